"""The package itself: its public names, what importing it costs, and the versions of torch that it takes."""

import subprocess
import sys
import warnings

import pytest

import rotpass
from rotpass import _torch

PUBLIC = {
    "FakeQuant", "Recipe", "Report", "RotationPass", "Site", "backend", "explain", "fold_", "hadamard_matrix",
    "hadamard_transform", "unfold_",
}  # fmt: skip


def test_public_names_have_docstrings():
    assert set(rotpass.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(rotpass, name).__doc__.strip()


def test_no_module_hides_a_public_name():
    for name in PUBLIC:
        assert not isinstance(getattr(rotpass, name), type(sys))


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("2.10.1", ImportError),
        ("2.11.0+cpu", None),
        ("2.14.1", None),
        ("2.15.0.dev20261130", UserWarning),
        ("3.0", UserWarning),
    ],
)
def test_versions_of_torch(version, answer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if answer is ImportError:
            with pytest.raises(ImportError, match="needs torch 2.11 or newer"):
                _torch.check_version(version)
        else:
            _torch.check_version(version)
    assert [w.category for w in caught] == ([UserWarning] if answer is UserWarning else [])


def test_importing_needs_torch_and_sympy_alone():
    """Everything else that rotpass can use is an extra, and Inductor is left until it compiles something."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'numpy', 'scipy', 'transformers', 'torchao', 'executorch', 'triton'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import rotpass, torch\n"
        "x = torch.ones(2, 48)\n"
        "assert torch.allclose(rotpass.hadamard_transform(rotpass.hadamard_transform(x), transpose=True), x)\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
