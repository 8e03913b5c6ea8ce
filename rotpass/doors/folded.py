"""What stands on a folded module: hooks, the plan, and what has code that was compiled before compiled again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rotpass import _torch, plan
from rotpass.rewrite import Fold


class OnlineRotation:
    """Forward pre-hook: the online half of R4."""

    def __init__(self, size: int, table: str, seed: int | None) -> None:
        self.size, self.table, self.seed = size, table, seed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # a tool that copied the hook (quantize_dynamic) has forgotten with_kwargs
            return (self._rotate(args[0]), *args[1:])
        if args:
            return (self._rotate(args[0]), *args[1:]), kwargs
        name, x = next(iter(kwargs.items()))
        return args, {**kwargs, name: self._rotate(x)}

    def _rotate(self, x: Tensor) -> Tensor:
        return torch.ops.rotpass.hadamard(x, self.size, False, self.table, self.seed)


class Watched:
    """A module's ``forward`` under another identity.

    Dynamo guards on that but not on hooks or on weights, so that code compiled before a fold is not run after it.
    """

    def __init__(self, forward: Any) -> None:
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class Member:
    """Has a folded module known again after it was copied or unpickled: the copy's member registers the copy."""

    def __init__(self, module: nn.Module, made: plan.Plan) -> None:
        self.__setstate__({"module": module, "plan": made})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        plan.register(self.module)

    def check_load(self, module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        """Before a state dict is loaded: weights that are not folded as the module's hooks expect are an error."""
        theirs = state_dict.get(prefix + plan.BUFFER)
        if theirs is None:
            held = next((prefix + name for name, _ in self.plan.folds if prefix + name in state_dict), None)
            if held is not None:
                raise RuntimeError(
                    f"the model is folded and the state dict's {held} is not (it has no {prefix + plan.BUFFER}): "
                    "load it into the model before fold_"
                )
        elif not theirs.is_meta:
            loaded = plan.Plan.from_tensor(theirs)
            if (loaded.folds, loaded.hooks) != (self.plan.folds, self.plan.hooks):
                raise RuntimeError("the state dict's weights are folded by another recipe than the model's")


def folded(model: nn.Module, folds: tuple[tuple[str, Fold], ...]) -> list[tuple[Tensor, Tensor]]:
    """(weight, what it is to hold); all of it is made before the first weight changes, so that a failure leaves the model.

    Raises:
        ValueError: a weight cannot be folded as it stands.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for name, fold in folds:
        tensor = plan.weight(model, name)
        if tensor is None:
            raise ValueError(f"the folded weight {name} is gone from the model")
        if not _torch.is_plain(tensor):
            raise ValueError(f"the weight {name} has become a {type(tensor).__name__}: unfold before quantizing")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
            raise ValueError(f"the weight {name} is expanded, so that its elements share memory: make it contiguous")
        with _torch.plain_state(tensor.device):
            made[id(tensor)] = tensor, fold.apply(made.get(id(tensor), (tensor, tensor))[1])
    return list(made.values())


def install(model: nn.Module, made: plan.Plan, tensors: list[tuple[Tensor, Tensor]]) -> None:
    """Makes ``model`` a folded module."""
    _write(tensors)
    device = tensors[0][0].device if tensors else torch.device("cpu")
    with _torch.plain_state(device):
        model.register_buffer(plan.BUFFER, made.to_tensor().to(device))
    hooked = set()
    for where, size, table, seed in made.hooks:
        module = model.get_submodule(where)
        if module not in hooked:  # the same module under another name
            module.register_forward_pre_hook(OnlineRotation(size, table, seed), with_kwargs=True)
            hooked.add(module)
    for module in _touched(model, made):
        module.forward = Watched(module.forward)
    model._rotpass_member = member = Member(model, made)
    model.register_load_state_dict_pre_hook(member.check_load)


def check_hooks(model: nn.Module, made: plan.Plan) -> None:
    """Before anything is taken back: all that was installed must still be there.

    Raises:
        ValueError: an online rotation is gone.
    """
    for where, *rotation in made.hooks:
        module = plan.submodule(model, where)
        hooks = () if module is None else module._forward_pre_hooks.values()
        if not any(isinstance(hook, OnlineRotation) and [*vars(hook).values()] == rotation for hook in hooks):
            raise ValueError(
                f"the online rotation of {where} is gone: the module was swapped after fold_, so what its weight holds "
                "is unknown"
            )


def remove(model: nn.Module, made: plan.Plan, tensors: list[tuple[Tensor, Tensor]]) -> None:
    """Takes :func:`install` back."""
    _write(tensors)
    for where, *_ in made.hooks:
        module = model.get_submodule(where)
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, OnlineRotation)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for module in _touched(model, made):
        _unwatch(module)
    hooks = model._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(getattr(hook.hook, "__self__", None), Member)]:
        del hooks[key]
    del model._buffers[plan.BUFFER], model._rotpass_member
    plan.forget(model)


def _unwatch(module: nn.Module) -> None:
    forward = module.__dict__.get("forward")
    if not isinstance(forward, Watched):
        # Someone has wrapped it since, or set another: that stays, under an identity which compiled code does not know.
        module.forward = Watched(module.forward)
        return
    del module.forward
    if getattr(forward.__wrapped__, "__func__", None) is not type(module).forward:
        module.forward = forward.__wrapped__  # it was an attribute of the module before


def _touched(model: nn.Module, made: plan.Plan) -> list[nn.Module]:
    names = [name.rpartition(".")[0] for name, _ in made.folds] + [where for where, *_ in made.hooks]
    return list(dict.fromkeys(model.get_submodule(name) for name in names))


def _write(tensors: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, new in tensors:
        # Switching inference mode off switches gradients on.
        with _torch.plain_state(tensor.device), torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(new)
    torch.clear_autocast_cache()  # it holds casts of the weights until the user's autocast block ends
