"""The zoo's decoders over their KV caches: a prompt and eight tokens, the same logits as the model's own.

In the same place, since they take as long: the zoo in bfloat16, where rotations may add rounding but not much.
"""

import pytest
import torch
from architectures import REG, exported_step
from rotated import (
    NO_STATIC_CACHE,
    decoded,
    decoded_by_export,
    difference,
    expected,
    in_bfloat16,
    names,
    tolerance,
)

import rotpass

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
DECODERS = [name for name, (family, *_) in REG.items() if family == "decoder"]
WHOLE = "the whole cache is rotated at every step"


def count(name: str, door: str) -> dict[str, int]:
    """The rotated sites of each kind in the table."""
    lines = [line.split() for line in expected()[name, door]]
    return {kind: sum(words[0] == kind and words[3] == "rotated" for words in lines) for kind in ("r3", "v", "r4")}


@pytest.mark.parametrize("kind", ("static", "dynamic"))
@pytest.mark.parametrize("name", DECODERS)
def test_decode(name: str, kind: str) -> None:
    logits = decoded(name, kind)
    for cache in ("plain", "rotated"):
        backend = rotpass.backend(inner="eager", seed=5, cache=cache)
        backend.clear()
        with torch._dynamo.config.patch(recompile_limit=32):  # dbrx: one wrapper's code for many modules
            error = max(map(difference, logits, decoded(name, kind, backend)))
        assert error <= tolerance(name)
        assert backend.report.counts == count(name, "compile") and not backend.report.refused
        assert any(WHOLE in site.reason for site in backend.report) == (cache == "plain")


@pytest.mark.parametrize("name", DECODERS)
def test_decode_by_export(name: str) -> None:
    if name in NO_STATIC_CACHE:
        with pytest.raises(Exception):  # noqa: B017  what is raised there is their own affair
            exported_step(name)
        return
    report, error = decoded_by_export(name)
    assert error <= 1e-5  # float32: transformers' exporter wants it
    assert report.counts == count(name, "compile") and not report.refused


@pytest.mark.parametrize("name", names())
def test_bfloat16(name: str) -> None:
    before, after = in_bfloat16(name)
    assert after <= 2 * before
