"""The store of folded copies: they follow their weights, keep their storage, die with them, and are cheap to check."""

import dataclasses
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from rotpass import copies
from rotpass.rewrite import Fold

FOLDS = (Fold(axis=1, size=16, table="default", seed=None),)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A fold that is easy to check, and that can be made to fail."""

    factor: float

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        if Scale.failing:
            raise torch.OutOfMemoryError("no memory (a test)")
        return weight.double().mul(self.factor).to(weight.dtype)


Scale.failing = False


def weight(*shape: int, **kwargs) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape or (8, 16), **kwargs))


def follows(source: torch.Tensor, folds=FOLDS) -> torch.Tensor:
    """The copy, which must be the fold of what the source holds now."""
    copy = copies.get(source, folds)
    expected = source.detach()
    for fold in folds:
        expected = fold.apply(expected)
    torch.testing.assert_close(copy, expected, rtol=0, atol=0)
    assert type(copy) is torch.Tensor and not copy.requires_grad and not copy.is_inference()
    return copy


def test_one_copy_per_weight_and_folds() -> None:
    w, other = weight(), weight()
    copy = follows(w)
    assert follows(w) is copy
    assert follows(other) is not copy
    assert follows(w, (dataclasses.replace(FOLDS[0], seed=3),)) is not copy
    assert follows(w, FOLDS * 2) is not copy
    assert follows(w) is copy
    assert copies.get(w, tuple(dataclasses.replace(fold) for fold in FOLDS)) is copy, "equal folds are the same folds"


def test_in_place_changes_keep_the_storage() -> None:
    w = weight()
    copy, before = follows(w), w.detach().clone()
    with torch.no_grad():
        w.mul_(2)
    assert follows(w) is copy
    w.detach().copy_(before)
    assert follows(w) is copy
    layer = nn.Linear(16, 8)
    copy = follows(layer.weight)
    layer.load_state_dict(nn.Linear(16, 8).state_dict())
    assert follows(layer.weight) is copy


def test_new_data_keeps_the_storage() -> None:
    w = weight()
    copy = follows(w)
    w.data = torch.randn(8, 16)  # the old storage dies
    assert follows(w) is copy
    old = w.data
    w.data = torch.randn(8, 16)  # the old storage lives
    assert follows(w) is copy
    w.data = old
    assert follows(w) is copy
    for _ in range(50):  # the allocator hands the same addresses out again
        w.data = torch.randn(8, 16)
        w.data = torch.randn(8, 16)
        assert follows(w) is copy


def test_storage_resized() -> None:
    w = weight()
    copy = follows(w)
    values = torch.randn(8, 16)
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(values.untyped_storage().nbytes())
    w.data.copy_(values)
    copies.refresh()
    assert follows(w) is copy


def test_assigned_parameters_get_their_own() -> None:
    layer = nn.Linear(16, 8)
    follows(layer.weight)
    layer.load_state_dict(nn.Linear(16, 8).state_dict(), assign=True)
    follows(layer.weight)
    layer.weight = nn.Parameter(torch.randn(8, 16))
    follows(layer.weight)


def test_swap_tensors() -> None:
    w, other = weight(), weight()
    copy, other_copy = follows(w), follows(other)
    torch.utils.swap_tensors(w, other)
    assert follows(w) is copy and follows(other) is other_copy
    fresh = weight()
    torch.utils.swap_tensors(w, fresh)
    del fresh
    assert follows(w) is copy


@pytest.mark.parametrize("change", ["dtype", "shape", "strides", pytest.param("device", marks=pytest.mark.gpu)])
def test_another_layout_is_another_copy(change: str) -> None:
    layer = nn.Linear(16, 16, bias=False)
    w = layer.weight
    copy = weakref.ref(follows(w))
    if change == "dtype":
        layer.to(torch.bfloat16)
    elif change == "shape":
        w.data = torch.randn(4, 16)
    elif change == "strides":
        w.data = w.data.t()  # the same storage, address and version
    else:
        layer.to("cuda")
    new = follows(layer.weight)
    assert new.stride() == layer.weight.stride()
    assert copy() is None


def test_views_and_gaps() -> None:
    base = torch.randn(4, 40)
    left, right = base[:, :16], base[:, 16:32]
    assert follows(left) is not follows(right)
    base.mul_(2)  # versions are shared by views
    follows(left)
    follows(right)


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizer_steps(optimizer: type, how: dict) -> None:
    w, still = weight(), weight()
    copy, still_copy = follows(w), follows(still)
    column = copies.column(FOLDS)
    stepping = optimizer([w], lr=0.1, **how)
    for _ in range(2):
        w.grad = torch.randn_like(w)
        before = w.detach().clone()
        stepping.step()
        assert not torch.equal(w, before)
        assert not column[id(w)].is_of(w) and column[id(still)].is_of(still), "only what was stepped is stale"
        assert follows(w) is copy
    assert follows(still) is still_copy


def test_optimizer_over_flattened_parameters() -> None:
    flat = nn.Parameter(torch.randn(2 * 8 * 16))
    w = nn.Parameter(flat.data[: 8 * 16].view(8, 16))
    copy = follows(w)
    flat.grad = torch.randn_like(flat)
    torch.optim.AdamW([flat], lr=0.1, fused=True).step()
    assert follows(w) is copy


def test_compiled_optimizer_step() -> None:
    w = weight()
    copy = follows(w)
    stepping = torch.optim.AdamW([w], lr=0.1)
    w.grad = torch.randn_like(w)

    @torch.compile(backend="aot_eager")
    def step() -> None:
        stepping.step()

    for _ in range(2):
        step()
        assert follows(w) is copy


def test_writes_through_data_need_refresh() -> None:
    w = weight()
    copy = follows(w)
    w.data.mul_(2)
    copies.refresh()
    torch.testing.assert_close(copy, FOLDS[0].apply(w), rtol=0, atol=0)  # at once: a captured CUDA graph asks nobody
    assert follows(w) is copy


def test_inference_tensors() -> None:
    with torch.inference_mode():
        w = torch.randn(8, 16)
        copy = follows(w)
        assert follows(w) is copy
        w.mul_(2)  # no version counts this
        copies.refresh()
        assert follows(w) is copy
    assert follows(w) is copy
    normal = weight()
    with torch.inference_mode():
        copy = follows(normal)
    with torch.no_grad():
        normal.add_(1)
    assert follows(normal) is copy


def test_what_surrounds_the_call_does_not_matter() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("a fold is none of the user's operators")

    w = weight()
    expected = FOLDS[0].apply(w)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.enable_grad(), Refuse():
        copy = copies.get(w, FOLDS)
    assert copy.device.type == "cpu"
    torch.testing.assert_close(copy, expected, rtol=0, atol=0)


def test_failing_folds_leave_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    folds = (Scale(3.0),)
    w = weight()
    monkeypatch.setattr(Scale, "failing", True)
    with pytest.raises(torch.OutOfMemoryError):
        copies.get(w, folds)
    assert not copies.column(folds)
    monkeypatch.setattr(Scale, "failing", False)
    copy = follows(w, folds)
    with torch.no_grad():
        w.add_(1)
    monkeypatch.setattr(Scale, "failing", True)
    for _ in range(2):  # never the stale one instead
        with pytest.raises(torch.OutOfMemoryError):
            copies.get(w, folds)
        with pytest.raises(torch.OutOfMemoryError):
            copies.refresh()
    monkeypatch.setattr(Scale, "failing", False)
    assert follows(w, folds) is copy


def test_copies_die_with_their_weights() -> None:
    folds = (dataclasses.replace(FOLDS[0], seed=77),)  # nobody else's
    weights = [weight() for _ in range(10)]
    dying = [weakref.ref(follows(w, folds)) for w in weights]
    kept = follows(weights[0], folds)
    keep = weights[0]
    del weights
    gc.collect()
    assert [ref() is not None for ref in dying] == [True] + [False] * 9
    assert follows(keep, folds) is kept
    del keep, kept
    follows(weight(), folds)  # without the collector: when another weight needs memory
    assert dying[0]() is None
    gc.collect()
    assert not copies.column(folds)


def test_weights_get_no_weak_references_or_attributes() -> None:
    w = weight()
    follows(w)
    assert not weakref.getweakrefs(w) and not w.__dict__


def test_threads() -> None:
    weights = [weight(32, 64) for _ in range(8)]
    folds = (Fold(axis=1, size=64, table="default", seed=1),)
    seen: list[set[int]] = [set() for _ in weights]
    errors = []

    def reader() -> None:
        try:
            for round_ in range(60):
                w = weights[round_ % 8]
                seen[round_ % 8].add(copies.get(w, folds).data_ptr())
                if round_ % 7 == 0:
                    copies.refresh()
                if round_ % 5 == 0:
                    copies.get(weight(32, 64), folds)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=reader) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(len(pointers) == 1 for pointers in seen)
    for w in weights:
        follows(w, folds)


def test_a_check_takes_microseconds() -> None:
    weights = [weight() for _ in range(100)]
    column = copies.column(FOLDS)
    for w in weights:
        copies.get(w, FOLDS)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for w in weights:
            copies.lookup(w, column, FOLDS)
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3, f"{best * 1e6:.0f} µs for 100 weights"  # 0.1 ms where nothing else runs
