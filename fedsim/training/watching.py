"""Watches which images and labels a PyTorch training loop really computes its steps from.

Nothing of the loop is changed. What counts is what the model is called with, not what a loader
yields: after all transforms, and only where gradients are computed. An input and the labels that a
loss compares its output with make a batch; what optimizers are stepped with makes a step.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_LOSSES = ("cross_entropy", "nll_loss")
"""Functions of torch.nn.functional; the modules of these losses call them."""
_IMAGE_AXES = 4


@dataclass
class Steps:
    """The steps of one client's local training, as they were computed."""

    max_images: int
    images: list[Tensor] = field(default_factory=list)
    """(C, H, W) float32 each: different inputs of the model, normalized and augmented as it got
    them."""
    labels: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Which of `images` the batches were made of, one after the other."""
    sizes: list[int] = field(default_factory=list)
    """How many images each step was computed from."""
    optimizer: str | None = None
    settings: dict[str, float] = field(default_factory=dict)
    """Learning rate, momentum and the like of the first step."""
    training_mode: bool = True
    """Whether the model's layers computed in training mode."""
    left_out: int = 0
    """Images beyond `max_images`."""
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Adds a step on `batches` of (images, labels)."""
        self.sizes.append(sum(len(images) for images, _ in batches))
        for images, labels in batches:
            for image, label in zip(images, labels.tolist(), strict=True):
                key = hashlib.sha256(image.numpy().tobytes() + bytes(str(label), "ascii")).digest()
                if key not in self._known:
                    if len(self.images) >= self.max_images:
                        self.left_out += 1
                        continue
                    self._known[key] = len(self.images)
                    self.images.append(image)
                    self.labels.append(label)
                self.order.append(self._known[key])


@contextmanager
def watched(max_images: int) -> Iterator[Steps]:
    """Yields the steps that this thread's training takes inside the block.

    Images beyond `max_images` different ones are counted and not kept. What it cannot see: labels
    that are no class numbers, losses other than cross-entropy and negative log-likelihood of
    `torch.nn.functional` (or functions of it that were imported by name before), models that are
    no `nn.Module`, and training in other threads or processes.
    """
    watch = _Watch(Steps(max_images=max_images))
    losses: dict[str, Callable[..., Tensor]] = {name: getattr(F, name) for name in _LOSSES}
    handles = [
        hooks.register_module_forward_pre_hook(watch.called),
        hooks.register_module_forward_hook(watch.returned, always_call=True),
        register_optimizer_step_pre_hook(watch.stepped),
    ]
    for name, function in losses.items():
        setattr(F, name, watch.listening(function))
    try:
        yield watch.steps
    finally:
        for name, function in losses.items():
            setattr(F, name, function)
        for handle in handles:
            handle.remove()
        watch.end()


class _Watch:
    """What the hooks share."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._thread = threading.get_ident()
        self._depth = 0
        self._inputs: Tensor | None = None
        """What the model was called with last."""
        self._caught = False
        """Whether the call that is going on has had its images."""
        self._batches: list[tuple[Tensor, Tensor]] = []
        """Of the step that is coming."""

    def called(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Before a module computes: the first images within a call from outside are the model's."""
        if threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._caught = False
        self._depth += 1
        if self._caught or not torch.is_grad_enabled():
            return
        for value in arguments:
            if isinstance(value, Tensor) and _are_images(value):
                self._inputs = value.detach()
                self._caught = True
                self.steps.training_mode = module.training
                return

    def returned(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        """After a module has computed, also if it failed."""
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)

    def listening(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns `loss`, which now also tells of its labels."""

        def told(input: Tensor, target: Tensor, *arguments: Any, **named: Any) -> Tensor:
            if threading.get_ident() == self._thread and torch.is_grad_enabled():
                self._pair(target)
            return loss(input, target, *arguments, **named)

        return told

    def _pair(self, labels: Any) -> None:
        images, self._inputs = self._inputs, None
        if images is None or not isinstance(labels, Tensor):
            return
        if labels.dtype == torch.int64 and labels.shape == images.shape[:1]:
            copies = images.to("cpu", torch.float32, copy=True), labels.detach().to("cpu")
            self._batches.append(copies)

    def stepped(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        """Before an optimizer steps."""
        if threading.get_ident() != self._thread or not self._batches:
            return
        if not self.steps.sizes:
            self.steps.optimizer = type(optimizer).__name__
            self.steps.settings = {
                name: float(value)
                for name, value in optimizer.param_groups[0].items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
        self._take()

    def end(self) -> None:
        """At the end: batches that no optimizer stepped with are those of one gradient."""
        if self._batches and not self.steps.sizes:
            self._take()

    def _take(self) -> None:
        batches, self._batches = self._batches, []
        self.steps.add(batches)


def _are_images(value: Tensor) -> bool:
    return value.ndim == _IMAGE_AXES and value.is_floating_point() and len(value) > 0
