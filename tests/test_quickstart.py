"""The quickstart's parts on its real model: 30 of 30 layers rotated, equal logits, and less damage from 4 bits."""

from pathlib import Path

import pytest
import quickstart
import quickstart_picture
import torch

import rotpass

LAYERS = 30
pytestmark = pytest.mark.xdist_group("smollm2")  # one worker loads the model


@pytest.fixture(scope="module")
def smollm2():
    """The model, one window of 512 tokens and its logits."""
    try:
        model, tokenizer = quickstart.load(None)
    except SystemExit as error:
        pytest.skip(f"SmolLM2 is not to be had: {error}")
    window = quickstart.cut_windows(tokenizer, quickstart.read_text(None), 1, 512)[0]
    with torch.no_grad():
        return model.requires_grad_(False), window, quickstart.logits_of(model, window)


def test_every_layer_is_rotated_and_the_logits_stay(smollm2) -> None:
    model, window, original = smollm2
    torch.compiler.reset()
    backend = rotpass.backend(inner="eager")
    backend.clear()  # interned: another test may have filled its report
    with torch.no_grad():
        rotated = quickstart.logits_of(torch.compile(model, backend=backend, fullgraph=True), window)
    report = backend.report
    assert report.counts == {"r3": LAYERS, "v": LAYERS, "r4": LAYERS}
    assert not report.refused
    values = [site for site in report.sites if site.kind == "v"]
    assert all((site.inserted, site.undone) == ("folded", "folded") for site in values)
    assert quickstart.relative_difference(rotated, original) < 1e-5


def test_r4_saves_a_four_bit_down_projection(smollm2) -> None:
    model, window, original = smollm2
    name = "down input 4 bit"
    with torch.no_grad():
        log_p = original[:-1].log_softmax(-1)
        ((plain, plain_kl), (rotated, rotated_kl)) = quickstart.study(model, [name], window[None], [log_p])[name]
    assert rotated < plain / 2  # 41.2 against 14.5 on 2 x 1024 tokens
    assert rotated_kl < plain_kl / 4


def test_without_a_compiler_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert quickstart.inductor_or_fallback() == "aot_eager"
    assert "no-such-compiler" in capsys.readouterr().out


def test_a_bad_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere.txt"):
        quickstart.read_text(str(tmp_path / "nowhere.txt"))
    tokenizer = lambda text, **_: type("Encoding", (), {"input_ids": torch.zeros(1, len(text.split()))})  # noqa: E731
    with pytest.raises(SystemExit, match="the text has 2 tokens"):
        quickstart.cut_windows(tokenizer, "Too short.", 2, 1024)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    x = torch.randn(8, 64)
    rows = {"K, V 4 bit": [(15.8, 0.1), (14.7, 0.05)], "down input 4 bit": [(900.0, 4.0), (14.9, 0.1)]}
    quickstart_picture.draw("layers.0.mlp.down_proj", x, x, 13.4, rows, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000
