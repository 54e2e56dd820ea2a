"""Watches which images and labels a PyTorch training loop computes its steps from, and keeps them.

What counts is what the model is called with where gradients are computed. An input and the labels
that a loss compares its output with make a batch; what optimizers are stepped with makes a step.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fedsim.recording.exchanges import DeployedPart
from fedsim.recording.witnessed import Witnessed, run_of, save_unseen, save_witnessed
from fedsim.types import FedsimError

_LOSSES = ("cross_entropy", "nll_loss")
"""Functions of torch.nn.functional; the modules of these losses call them."""
_ARGUMENTS = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)
_IGNORED = -100
"""PyTorch's default of `ignore_index`."""
_IMAGE_AXES = 4
_MOST_ACCUMULATED = 129
"""Exclusive bound on the number of accumulated batches by which an app may divide its losses."""
_NEAR = 1e-2
"""Relative difference up to which two estimates of a proximal term's factor agree."""
_ROUNDED = 1e-5


@dataclass
class Steps:
    """Holds the watched steps of one client's training, and at most `max_images` images."""

    max_images: int
    images: list[Tensor] = field(default_factory=list)
    """(C, H, W) float32 each, on the CPU: different inputs of the model, normalized and augmented
    as it got them."""
    labels: list[int] = field(default_factory=list)
    """Class of each of `images`; an image with two labels is there twice."""
    order: list[int] = field(default_factory=list)
    """Indices in `images` of the members of all batches, one after the other. Images that were left
    out are missing here, but counted in `sizes`."""
    sizes: list[int] = field(default_factory=list)
    """Number of images of each step."""
    optimizer: str | None = None
    """Class name of the optimizer, such as `SGD`; None if none stepped."""
    settings: dict[str, float] = field(default_factory=dict)
    """Numeric options of the first step, by the optimizer's own names (`lr`, `momentum`). The two
    `betas` are `beta1` and `beta2`; a flag is 0 or 1."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each step, 0 if its optimizer has none; empty if no optimizer stepped."""
    factors: list[float] = field(default_factory=list)
    """Factor by which each step's gradient exceeds that of the mean loss of its images, as where
    losses are summed; 1 for the mean. Empty if no optimizer stepped."""
    loss: dict[str, Any] = field(default_factory=dict)
    """`label_smoothing` (float) and `class_weights` (list of floats), where the loss has them."""
    proximal: float = 0.0
    """μ of FedProx, if its term is all that is differentiated besides the loss; else 0."""
    unmodelled: list[str] = field(default_factory=list)
    """Properties of the training that no attack models, in words."""
    training_mode: bool = True
    """Whether the model's layers computed in training mode."""
    left_out: int = 0
    """Number of images, counted at each use, that were not kept beyond `max_images`."""
    saw_images: bool = False
    """Whether the model was called with images, whatever its loss compares them with."""
    called_with: str | None = None
    """Types and shapes of a first call of the model without images, in words; None if none."""
    failure: str | None = None
    """Error that ended the watch, which leaves all other fields incomplete; else None."""
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, batches: list[tuple[Tensor, Tensor]]) -> bool:
        """Appends a step to `images`, `labels`, `order` and `sizes`, and counts `left_out`.

        Its batches are (images (B, C, H, W), labels (B,)) on the CPU. Returns whether one batch has
        an example twice.
        """
        self.sizes.append(sum(len(images) for images, _ in batches))
        is_repeated = False
        for images, labels in batches:
            own = set()
            for image, label in zip(images, labels.tolist(), strict=True):
                # The label is hashed, too: one image under two labels is two examples.
                key = hashlib.sha256(image.numpy().tobytes() + bytes(str(label), "ascii")).digest()
                is_repeated |= key in own
                own.add(key)
                if key not in self._known:
                    if len(self.images) >= self.max_images:
                        self.left_out += 1
                        continue
                    self._known[key] = len(self.images)
                    self.images.append(image)
                    self.labels.append(label)
                self.order.append(self._known[key])
        return is_repeated


@contextmanager
def watch_training(max_images: int) -> Iterator[Steps]:
    """Watches, as a context manager, the steps that this thread's training takes in the block.

    The `Steps` that it yields are complete at the block's end. Images beyond `max_images` different
    ones are counted and not kept. The watch hooks PyTorch for the block's time. It sees calls of
    `nn.Module` with images, and the `cross_entropy` and `nll_loss` of `torch.nn.functional` with
    class numbers, unless compiled or imported by name before. A fault of the watch never reaches
    the training: it ends the watch, as `Steps.failure` says.
    """
    watch = _Watch(Steps(max_images=max_images))
    watch.attempt(_hooks.add, watch)
    try:
        yield watch.steps
    finally:
        watch.attempt(_hooks.remove, watch)
        watch.attempt(watch.end)


@dataclass
class _Loss:
    """A loss that was computed, of which it is not yet known whether a step learns from it."""

    images: Tensor
    labels: Tensor
    mean: float
    factors: tuple[float, ...]  # factors by which a sum of losses, or their plain mean, exceeds it
    differentiated: bool = False

    def mark(self, _: Tensor) -> None:
        self.differentiated = True


class _Watch:
    """Gathers what the hooks hear of one thread's training."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._thread = threading.get_ident()
        self._depth = 0
        self._inputs: Tensor | None = None
        """Images that the model was called with last."""
        self._caught = False
        """Whether images were found in the call that is going on."""
        self._losses: list[_Loss] = []
        """Losses that belong to the coming step."""
        self._differentiated: list[float] = []
        """Values that were differentiated for the coming step."""
        self._scale = 1.0
        """Factor by which a GradScaler multiplied these values, and divided the gradients again."""
        self._proximal: list[float] = []
        """Estimates of the factor of a proximal term, one a step that has one."""
        self._start: list[Tensor] | None = None
        """Weights before the first step."""

    def hear(self, event: Callable[..., None], *arguments: Any) -> None:
        if threading.get_ident() == self._thread and self.steps.failure is None:
            self.attempt(event, self, *arguments)

    def attempt(self, act: Callable[..., None], *arguments: Any) -> None:
        """Calls `act` with `arguments`; if that fails, the watch ends and the training goes on."""
        try:
            act(*arguments)
        except Exception as error:
            self.steps.failure = f"{type(error).__name__}: {error}"
            self._losses.clear()
            self.steps.images.clear()

    def on_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        # Modules call modules: only at depth 0 does the loop itself call, with a new batch.
        if self._depth == 0:
            self._caught = False
        self._depth += 1
        if self._caught or not torch.is_grad_enabled():
            return
        for value in arguments:
            if isinstance(value, Tensor) and _are_images(value):
                self._inputs = value.detach()
                self._caught = self.steps.saw_images = True
                self.steps.training_mode = module.training
                return
        # A loss is a module, too, but nothing is learned in it.
        if self.steps.called_with is None and next(module.parameters(), None) is not None:
            tensors = [value for value in arguments if isinstance(value, Tensor)]
            kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in tensors]
            self.steps.called_with = " and ".join(kinds) or "no tensor"

    def on_return(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        # The return of a call that began before the watch is heard, too.
        self._depth = max(0, self._depth - 1)

    def on_loss(self, value: Tensor, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        given = {**dict(zip(_ARGUMENTS, arguments, strict=False)), **named}
        labels = given["target"]
        # Each input serves one loss: what a second loss makes of the same batch is not modelled.
        images, self._inputs = self._inputs, None
        if images is None and self._losses and value.requires_grad:
            self._note("several losses are taken of one batch")
        if images is None or not isinstance(labels, Tensor):
            return
        if labels.dtype == torch.int64 and labels.shape == images.shape[:1]:
            counted = (labels.detach() != given.get("ignore_index", _IGNORED)).cpu()
            if not counted.any():
                return
            labels = labels.detach().cpu()[counted]
            # A loop may write its next batch into the same memory.
            copies = images.to("cpu", torch.float32, copy=True)[counted]
            weights, loss = given.get("weight"), dict[str, Any]()
            # torch's weighted mean divides by the sum of the weights.
            total = float(len(labels) if weights is None else weights[labels].sum())
            mean = value.detach().double().sum()
            summed = _Loss(
                images=copies,
                labels=labels,
                mean=float(mean if given.get("reduction", "mean") == "mean" else mean / total),
                factors=(total, total / len(images)),
            )
            if value.requires_grad:
                # The hook fires only if the loss, or a function of it, is differentiated.
                value.register_hook(summed.mark)  # type: ignore[no-untyped-call]
            self._losses.append(summed)
            if smoothing := given.get("label_smoothing"):
                loss["label_smoothing"] = float(smoothing)
            if isinstance(weights, Tensor):
                loss["class_weights"] = weights.detach().tolist()
            if self.steps.sizes and loss != self.steps.loss:
                self._note("its loss changes between steps")
            self.steps.loss = loss

    def on_backward(self, _: None, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        values = arguments[0] if arguments else named["tensors"]
        if isinstance(values, Tensor):
            self._differentiated.append(float(values.detach().sum()))

    def on_unscale(self, _: None, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Notes the factor that a GradScaler has taken from the gradients of an optimizer."""
        scaler, optimizer = (*arguments, *named.values())
        self._scale = float(scaler.get_scale())
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(p.grad.isfinite().all() for p in weights if p.grad is not None):
            self._clear()  # it leaves out this step

    def _note(self, what: str) -> None:
        if what not in self.steps.unmodelled:
            self.steps.unmodelled.append(what)

    def on_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        self._drop_unlearned()
        if not self._losses:
            self._clear()
            return
        # Fused optimizers unscale by themselves: a GradScaler leaves its factor on them.
        if isinstance(scale := getattr(optimizer, "grad_scale", None), Tensor):
            self._scale = float(scale)
        first, *others = (_settings(group) for group in optimizer.param_groups)
        if not self.steps.sizes:
            self.steps.optimizer = type(optimizer).__name__
            self.steps.settings = first
        if any(each != first for each in others):
            self._note("groups of parameters have settings of their own")
        known = {**self.steps.settings, "lr": first.get("lr")}
        if type(optimizer).__name__ != self.steps.optimizer or {"lr": None, **first} != known:
            self._note("its optimizer, or a setting of it other than lr, changes between steps")
        self.steps.rates.append(first.get("lr", 0.0))
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        # FedProx pulls towards the weights before the first step.
        if self._start is None:
            self._start = [p.detach().clone() for p in weights]
        self.steps.factors.append(self._factor(weights))
        self._take()

    def _factor(self, weights: list[Tensor]) -> float:
        """Returns the ratio of the step's gradient to that of the mean loss of its images."""
        count = len(self._losses)
        means = [loss.mean for loss in self._losses]
        values = [each / self._scale for each in self._differentiated]
        # Losses that were added up before the backward pass show as a single value.
        if len(means) != len(values):
            means, values = [math.fsum(means)], [math.fsum(values)]
        factors = [value / mean if mean else 1.0 for mean, value in zip(means, values, strict=True)]
        summed = [factor for loss in self._losses for factor in loss.factors]
        # Usual factors: none, the sum in place of the mean, and 1 / n for n accumulated batches.
        known = [1.0, *summed, *(1 / n for n in range(2, _MOST_ACCUMULATED))]
        for factor in known:
            if all(math.isclose(each, factor, rel_tol=_ROUNDED) for each in factors):
                return factor * count
        if not self._differentiated:
            return float(count)
        moved = zip(weights, self._start or [], strict=False)
        drift = math.fsum(float((p.detach() - q).double().square().sum()) for p, q in moved)
        # FedProx adds (μ / 2) ||θ - θ₀||² to the loss, which is solved for μ.
        found = 2 * (math.fsum(values) - math.fsum(means)) / drift if drift and count == 1 else 0.0
        self._proximal.append(found)
        return float(count)

    def end(self) -> None:
        """Ends the watch: batches that no optimizer stepped with are those of one gradient."""
        self._drop_unlearned()
        if self._losses and not self.steps.sizes:
            self._take()
        first, *others = self._proximal or [0.0]
        # A single estimate fits any term.
        agree = others and all(math.isclose(first, each, rel_tol=_NEAR) for each in others)
        if self._proximal and not (first > 0 and agree):
            self._note("what is differentiated is not the mean cross-entropy alone")
        self.steps.proximal = 0.0 if self.steps.unmodelled else first

    def _drop_unlearned(self) -> None:
        """Leaves out losses that nobody differentiated, as of a validation without `no_grad`."""
        self._losses = [loss for loss in self._losses if loss.differentiated]

    def _take(self) -> None:
        if self.steps.add([(loss.images, loss.labels) for loss in self._losses]):
            self._note("an image is more than once in a batch")
        self._clear()

    def _clear(self) -> None:
        self._losses, self._differentiated = [], []
        self._scale = 1.0


class _Hooks:
    """Hooks PyTorch once for all watches of this process, from the first to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: tuple[_Watch, ...] = ()
        self._undo: list[Callable[[], None]] = []

    def add(self, watch: _Watch) -> None:
        with self._lock:
            if not self._watches:
                self._put_in()
            self._watches = (*self._watches, watch)

    def remove(self, watch: _Watch) -> None:
        with self._lock:
            self._watches = tuple(each for each in self._watches if each is not watch)
            if not self._watches:
                while self._undo:
                    self._undo.pop()()

    def _put_in(self) -> None:
        for handle in (
            hooks.register_module_forward_pre_hook(partial(self._tell, _Watch.on_call)),
            hooks.register_module_forward_hook(
                partial(self._tell, _Watch.on_return), always_call=True
            ),
            register_optimizer_step_pre_hook(partial(self._tell, _Watch.on_step)),
        ):
            self._undo.append(handle.remove)
        places: list[tuple[Any, str, Callable[..., None]]] = [
            *((F, name, _Watch.on_loss) for name in _LOSSES),
            (torch.autograd, "backward", _Watch.on_backward),
            (torch.amp.GradScaler, "unscale_", _Watch.on_unscale),
        ]
        for owner, name, event in places:
            # Functions have no hooks: they are replaced where modules look them up.
            function = getattr(owner, name)
            setattr(owner, name, self._listening(function, event))
            self._undo.append(partial(setattr, owner, name, function))

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        # A compiler would take the watches into what it compiles, or refuse to compile.
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            for watch in self._watches:
                watch.hear(event, *arguments)

    def _listening(self, function: Any, event: Callable[..., None]) -> Callable[..., Any]:
        """Returns `function`, which now also tells an `event` of its value and arguments."""
        tell = self._tell

        def compute(*arguments: Any, **named: Any) -> Any:
            value = function(*arguments, **named)
            tell(event, value, arguments, named)
            return value

        # torch.jit.script compiles the source of what is wrapped, with the names of its module.
        code, names, cells = compute.__code__, function.__globals__, compute.__closure__
        return update_wrapper(types.FunctionType(code, names, None, None, cells), function)


_hooks = _Hooks()


def _settings(group: Mapping[str, Any]) -> dict[str, float]:
    """Returns a parameter group's numeric settings; the pair `betas` gives `beta1` and `beta2`."""
    found = {}
    for name, value in group.items():
        pair = name != "params" and isinstance(value, tuple | list)
        for place, each in enumerate(value if pair else [value], 1):
            if isinstance(each, Tensor) and each.numel() == 1:
                each = each.item()
            if isinstance(each, int | float) and abs(each) <= sys.float_info.max:
                found[f"{name.removesuffix('s')}{place}" if pair else name] = float(each)
    return found


def _are_images(value: Tensor) -> bool:
    return value.ndim == _IMAGE_AXES and value.is_floating_point() and len(value) > 0


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """Identifies a server's order to train, by the ids that the FL framework gives."""

    run_id: int
    round: int
    """Round that the order names, from 1; 0 if it names none."""
    node_id: int
    message_id: str
    """Id of the message, or of the task."""
    partition: int | None = None
    """Number of the client's partition of the data, from 0; None if not known."""


_WATCHED = (
    *("left_out", "sizes", "optimizer", "settings", "training_mode"),
    *("rates", "factors", "proximal", "unmodelled"),
)


def keep_testimony(
    folder: Path, steps: Steps, order: TrainingOrder, mods: list[DeployedPart], max_bytes: int
) -> None:
    """Writes the watched steps of one order, which a score needs as truth, below `folder`.

    Args:
        folder: Folder that has one of its own for each run, `run-<run_id>`.
        steps: Steps of `watch_training`, at its end.
        order: The order to train.
        mods: Parts of the app that change the answer, outermost first.
        max_bytes: Maximum size of all images and labels that are kept of a run.

    Raises:
        FedsimError: the watch failed or saw no labelled images, and this reason was written; or
            `max_bytes` would be exceeded, and nothing was.
        OSError: a file cannot be written.
    """
    if steps.failure is not None or not steps.images:
        reason = _why_nothing(steps)
        ids = order.run_id, order.round, order.node_id, order.message_id
        save_unseen(folder, *ids, reason=reason)
        raise FedsimError(reason)
    watched = {name: getattr(steps, name) for name in _WATCHED}
    said = Witnessed(**vars(order), images=len(steps.images), mods=mods, **watched, **steps.loss)
    images = torch.stack(steps.images)
    # Counted on disk, since each message may come to another process.
    files = run_of(folder, order.run_id).rglob("*.safetensors")
    used = sum(path.stat().st_size for path in files)
    if used + images.numel() * images.element_size() > max_bytes:
        raise FedsimError("there is no room for it below max_gib")
    save_witnessed(
        folder,
        said,
        {
            "images": images,
            "labels": torch.tensor(steps.labels),
            "order": torch.tensor(steps.order),
        },
    )


def _why_nothing(steps: Steps) -> str:
    """Returns the reason why a training has no truth that fedsim could score an attack by."""
    if steps.failure is not None:
        return f"the witness cannot follow how the client trains: {steps.failure}"
    if steps.saw_images:
        return (
            "the model was called with images, and no cross-entropy (or negative log-likelihood) "
            "of one class number for each image was seen: fedsim attacks classifiers of images, "
            "and not segmentation, several labels of an image, or other losses"
        )
    if steps.called_with is not None:
        return (
            f"the model was called with {steps.called_with}: in apps that are not its own, fedsim "
            "attacks images alone (floating point, of shape (N, C, H, W)), not text or tables"
        )
    return (
        "no model was seen that computes gradients in the client's own thread; "
        "docs/your-own-flower-app.md says what can be seen"
    )
