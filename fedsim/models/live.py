"""Models that somebody has built, taken apart into body and head, for attacks in this process.

They have no plugin and no parameters from which they could be built again: a copy is kept, under a
name of its own, for as long as the process lives.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedsim.models.base import Classifier
from fedsim.types import FedsimError, Mode

_TRIED = 2
"""Images by which a taken-apart model is compared with what it was."""
_PREFIX = "live:"
_numbers = itertools.count(1)
_models: dict[str, Classifier] = {}


def keep(model: Classifier, kind: str) -> str:
    """Keep `model`, and return the name under which `again` copies it."""
    name = f"{_PREFIX}{kind}-{next(_numbers)}"
    _models[name] = model
    return name


def is_live(name: str) -> bool:
    """Whether a model's name is of one that somebody has built."""
    return name.startswith(_PREFIX)


def kept(name: str) -> Mapping[str, Classifier]:
    """Return the model that `keep` named so, for processes that this one starts."""
    return {name: again(name)}


def adopt(models: Mapping[str, Classifier]) -> None:
    """Take over what another process has `kept`."""
    _models.update(models)


def again(name: str) -> Classifier:
    """Return a copy of the model that `keep` was given.

    Raises:
        FedsimError: it was built in another process.
    """
    if name not in _models:
        raise FedsimError(
            f"{name}: this model was handed to fedsim.observe in another process (or to fedsim "
            "assess), and has no plugin from which it could be built: call fedsim.observe again"
        )
    return copy.deepcopy(_models[name])


def taken_apart(
    model: nn.Module, input_shape: tuple[int, int, int], classes: int, head: str | None = None
) -> tuple[Classifier, Mapping[str, str]]:
    """Return a copy of `model` as body and head, and the names that its tensors have there.

    The head is the linear layer of `classes` outputs that is called last, if all that follows it
    is its output; a model without such a layer is all body. Masks of dropout are no attacker's to
    know: the copy has none.

    Args:
        model: Takes (B, C, H, W) and returns logits (B, K), or something with `logits`.
        input_shape: (C, H, W).
        classes: K.
        head: Name of the linear layer, if another one is meant than the last.

    Raises:
        FedsimError: the model does not take such images or has other outputs, a parameter has two
            names, or `head` is no linear layer that can be taken off.
    """
    own = copy.deepcopy(model)
    _prepare(own)
    whole = _Logits(own)
    probe = _probe(own, input_shape)
    expected, called = _traced(whole, probe)
    if expected.shape != (_TRIED, classes):
        raise FedsimError(
            f"model: expected logits of shape (B, {classes}), got "
            f"{tuple(expected.shape)[:1] and ('B', *tuple(expected.shape)[1:])}: check classes"
        )
    named = list(own.named_parameters(remove_duplicate=False))
    if len(named) > len(list(own.parameters())):
        raise FedsimError(
            "model: a parameter has two names (tied weights), and no update tells which is meant"
        )
    layer = head or next((name for name in reversed(called) if _is_head(own, name, classes)), None)
    if layer is None:
        return Classifier(whole, nn.Identity()), _renamed(own, None)
    if not _is_head(own, layer, classes):
        raise FedsimError(f"head: {layer} is no linear layer with {classes} outputs of the model")
    parent, _, last = layer.rpartition(".")
    linear = own.get_submodule(layer)
    names = _renamed(own, layer)
    setattr(own.get_submodule(parent), last, nn.Identity())
    found = Classifier(whole, linear)
    with torch.no_grad():
        parted = found.eval()(probe)
    if parted.shape == expected.shape and torch.allclose(parted, expected, rtol=1e-4, atol=1e-5):
        return found, names
    if head is not None:
        raise FedsimError(f"head: what the model returns is not the output of {head}")
    setattr(own.get_submodule(parent), last, linear)
    return Classifier(whole, nn.Identity()), _renamed(own, None)


def unused(model: Classifier, mode: Mode, input_shape: tuple[int, int, int]) -> set[str]:
    """Return the names of parameters on which the logits do not depend in this mode."""
    images = _probe(model, input_shape)
    model.train(mode == "train")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    named = [(name, p.requires_grad_()) for name, p in model.named_parameters()]
    found = torch.autograd.grad(model(images).sum(), [p for _, p in named], allow_unused=True)
    model.load_state_dict(before, strict=False)
    return {name for (name, _), gradient in zip(named, found, strict=True) if gradient is None}


class _Hardsigmoid(nn.Module):
    """As `nn.Hardsigmoid`, of operations that can be differentiated twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Any shape."""
        return F.relu6(inputs + 3) / 6


class _Hardswish(nn.Module):
    """As `nn.Hardswish`, of operations that can be differentiated twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Any shape."""
        return inputs * F.relu6(inputs + 3) / 6


def _prepare(model: nn.Module) -> None:
    """Make a copy fit for attacks: no masks, nothing in place, all differentiable twice."""
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if getattr(part, "inplace", False):
            setattr(part, "inplace", False)  # noqa: B010 - of a module of any kind
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Hardsigmoid):
                setattr(part, name, _Hardsigmoid())
            elif isinstance(child, nn.Hardswish):
                setattr(part, name, _Hardswish())


class _AnyOrder(TorchFunctionMode):
    """Lets `view` take tensors in any order of memory: attacks lay images out as is fastest."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.view and not any(isinstance(each, torch.dtype) for each in args):
            return args[0].reshape(*args[1:])
        return func(*args, **(kwargs or {}))


class _Logits(nn.Module):
    """A model whose answer is its logits, whatever they are wrapped in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, K)."""
        # Of other kernels of attention, no second derivative is known.
        with sdpa_kernel(SDPBackend.MATH), _AnyOrder():
            answer: Any = self.module(images)
        answer = getattr(answer, "logits", answer)
        return cast(Tensor, answer[0] if isinstance(answer, tuple) else answer)


def _probe(model: nn.Module, input_shape: tuple[int, int, int]) -> Tensor:
    like = next(model.parameters(), None)
    if like is None:
        raise FedsimError("model: it has no parameters, and so no update")
    shape = (_TRIED, *input_shape)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(device=like.device, dtype=like.dtype)


def _traced(model: _Logits, images: Tensor) -> tuple[Tensor, list[str]]:
    """The logits, and the names of linear layers in the order in which they are called."""
    called: list[str] = []
    hooks = [
        part.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, part in model.module.named_modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        with torch.no_grad():
            logits = model.eval()(images)
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"model: it does not take images of shape {tuple(images.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor):
        raise FedsimError(
            f"model: expected logits, or something that has `logits`, got {type(logits).__name__}"
        )
    return logits, called


def _is_head(model: nn.Module, name: str, classes: int) -> bool:
    try:
        part = model.get_submodule(name)
    except AttributeError:
        return False
    return bool(name) and isinstance(part, nn.Linear) and part.out_features == classes


def _renamed(model: nn.Module, head: str | None) -> dict[str, str]:
    """The new name of each parameter and buffer."""
    found = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        of_head = head is not None and name.startswith(f"{head}.")
        inner = name.removeprefix(f"{head}.") if of_head else name
        found[name] = f"head.{inner}" if of_head else f"body.module.{inner}"
    return found
