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
IN_PIECES = {"dbrx", "mpt"}  # Dynamo breaks their graphs inside a layer, at other places than in a prefill
LATENT = {"deepseek_v2", "deepseek_v3"}  # their caches hold what K and V are made of, not K and V
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
        assert not backend.report.refused
        if name not in IN_PIECES:
            assert backend.report.counts == count(name, "compile")
            assert any(WHOLE in site.reason for site in backend.report) == (cache == "plain" and name not in LATENT)


@pytest.mark.parametrize("name", DECODERS)
def test_decode_by_export(name: str) -> None:
    try:
        exported = exported_step(name)
    except Exception:
        assert name in NO_STATIC_CACHE  # which says why
        return
    report, error = decoded_by_export(*exported)
    assert error <= 1e-5  # float32: transformers' exporter wants it
    assert report.counts == count(name, "compile") and not report.refused


@pytest.mark.parametrize("name", names())
def test_bfloat16(name: str) -> None:
    before, after = in_bfloat16(name)
    assert after <= 2 * before
