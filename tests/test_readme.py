"""The README's Python runs as it stands, block after block in one namespace."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_python_blocks_run() -> None:
    pytest.importorskip("transformers", reason="the README's examples use a transformers model")
    text = README.read_text(encoding="utf-8")
    torch.manual_seed(0)
    torch.compiler.reset()
    namespace: dict[str, object] = {}
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 6
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # Compiled with the README's own line numbers, so that a traceback points into it.
        exec(compile("\n" * line + block.group(1), str(README), "exec"), namespace)
    torch.compiler.reset()


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("python3 ")]
    assert len(commands) == 2
    quickstart, tests = commands
    assert quickstart.endswith("examples/quickstart.py") and "pytest" not in quickstart
    assert "pytest" in tests  # .ci/run takes the first line that starts with python and has pytest in it
