"""Layers whose gradient is a product of their inputs, as a trace of the model finds them.

The gradient of a linear layer with weights W (m, n) and a batch of N inputs X (N, n) is

    ∂L/∂W = Δ' X        ∂L/∂b = Δ' 1        Δ = ∂L/∂Z (N, m)

so that its row space is that of the inputs, if there are at most m. A convolution whose output map
is a single pixel is such a layer, too: of the part of its input that its kernel covers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier
from fedsim.models.local import mean_gradient_factor
from fedsim.models.victim import rebuild
from fedsim.types import Observation

_TRACED = 16
"""Images of noise that the model is traced with."""
_SPARSE = 0.05
"""Least share of zeros of inputs that ReLU has left."""
_SAME = 1e-4
"""Relative difference of features up to which they are the same."""
_RESCALED = (0.7, 1.3)
"""Factors of the first and the last image, with which it is tried whether the scale of a layer's
input is lost: batch norm loses one that all images share, and no image's own."""
_PART = 3
"""Images that are run without the others, to see whether their features stay the same."""

FeaturesFunction = Callable[[Tensor], Tensor]
"""Function from a layer's inputs (N, n) to the features (N, d) of the model."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer, or a convolution to a single pixel, and its gradient in float64."""

    name: str
    weights: Tensor
    """(m, n): m outputs of n inputs."""
    bias: Tensor | None
    """(m,); None if the layer has none."""
    gradient: Tensor
    """(m, n), of the mean loss in `weights`; (m, n + 1) with that in the bias."""
    pixels: bool
    """Whether its input is the normalized image itself."""
    nonnegative: bool
    """Whether its input is what ReLU has left: never negative, and often 0."""
    rectified: bool
    """Whether ReLU alone follows it."""
    fed_by: str | None
    """Name of the layer whose rectified output its input is; None if there is none."""
    length: float
    """Root mean square of its inputs' norms on images of noise."""
    features: FeaturesFunction | None
    """Map from inputs to features; None if an image's features depend on more than its input."""
    scale_free: bool
    """Whether features do not depend on the scale of its input."""


def trace_layers(observation: Observation) -> list[Layer]:
    """Finds the body's layers in the update, in the order in which the model calls them."""
    effect = observation.effect
    if effect.removed is not None or effect.mixed:
        how = "mixes entries" if effect.mixed else "sets entries to zero"
        raise AttackFailed(
            f"a defense {how}, and what is left of a layer's gradient has not its inputs' row space"
        )
    if observation.training.dropout > 0:
        raise AttackFailed("dropout gives each image another network behind its layers")
    if not observation.training.sums_gradients:
        raise AttackFailed(
            "the clients' optimizer changes entries of the gradient, and a layer's update has not "
            "its inputs' row space: use an attack that simulates their steps"
        )
    model = rebuild(observation)
    model.train(observation.training.mode == "train")
    factor = mean_gradient_factor(observation.training)
    stream = torch.Generator().manual_seed(0)
    shape = (2, _TRACED, *observation.model.input_shape)
    images, others = torch.randn(shape, generator=stream).to(next(model.parameters()).device)
    calls, features = _run(model, images)
    # Tensors are known by their place in memory: the output of a layer may be a ReLU's input.
    rectified = {_place(c.before): _place(c.after) for c in calls if isinstance(c.module, nn.ReLU)}
    found: list[Layer] = []
    feeding: dict[_Place, str] = {}
    for call in calls:
        module, inside = call.module, call.before.flatten(1)
        if not isinstance(module, nn.Linear | nn.Conv2d) or not _is_linear(call):
            continue
        if call.name.partition(".")[0] in ("head", "imprint"):
            continue
        if f"{call.name}.weight" not in observation.update:
            continue
        weights, gradient = (
            _cut_reached(weight.detach(), call).double()
            for weight in (module.weight, observation.update[f"{call.name}.weight"])
        )
        gradient = gradient * factor
        if f"{call.name}.bias" in observation.update:
            slopes = observation.update[f"{call.name}.bias"].double() * factor
            gradient = torch.cat([gradient, slopes[:, None]], 1)
        tail = _closing_tail(model, call, calls, others, features)
        # Each image has a factor of its own: batch norm would undo a common one.
        factors = torch.linspace(*_RESCALED, len(inside)).to(inside)[:, None]
        nonnegative = bool((inside >= 0).all())
        found.append(
            Layer(
                name=call.name,
                weights=weights,
                bias=None if module.bias is None else module.bias.detach().double(),
                gradient=gradient,
                pixels=_place(call.before) == _place(images),
                nonnegative=nonnegative and float((inside == 0).double().mean()) > _SPARSE,
                rectified=_place(call.after) in rectified,
                fed_by=feeding.get(_place(call.before)),
                length=float(inside.double().square().sum(1).mean().sqrt()),
                features=tail,
                scale_free=tail is not None and _alike(tail(factors * inside), features),
            )
        )
        if _place(call.after) in rectified:
            feeding[rectified[_place(call.after)]] = call.name
    return found


_Place = tuple[int, int]
"""Address and number of a tensor's values: the same for views of it."""


@dataclass
class _LayerCall:
    name: str
    module: nn.Module
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class _Tail:
    """Function from the input of one of the model's modules to the model's features."""

    model: Classifier
    module: nn.Module
    images: Tensor
    """Any images: nothing of them reaches the features."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Computes features (N, d) from inputs (N, n)."""

        def replace(_: nn.Module, before: tuple[Tensor, ...]) -> Tensor:
            return inputs.to(before[0].dtype).reshape(len(inputs), *before[0].shape[1:])

        times = -(-len(inputs) // len(self.images))
        images = self.images.repeat(times, 1, 1, 1)[: len(inputs)]
        hook = self.module.register_forward_pre_hook(replace)
        try:
            with torch.no_grad():
                return self.model.features(images)
        finally:
            hook.remove()


def _closing_tail(
    model: Classifier, call: _LayerCall, calls: list[_LayerCall], images: Tensor, features: Tensor
) -> _Tail | None:
    """Finds the module from whose input, that of `call`, all features follow; or None."""
    # A path that bypasses the module, as around a block, would not end there; behind batch norm in
    # training mode, features depend on other images.
    for entry in calls:
        once = sum(c.module is entry.module for c in calls) == 1
        # A module called twice would have its input replaced twice.
        if once and entry.module is not model and _place(entry.before) == _place(call.before):
            tail, inside = _Tail(model, entry.module, images), call.before.flatten(1)
            # Other images go in: features that still agree follow from this input alone.
            if _alike(tail(inside), features) and _alike(tail(inside[:_PART]), features[:_PART]):
                return tail
    return None


def _run(model: Classifier, images: Tensor) -> tuple[list[_LayerCall], Tensor]:
    """Computes features; also returns the calls of modules, outer ones before what they call."""
    calls: list[_LayerCall] = []
    open_calls: list[_LayerCall] = []
    hooks: list[RemovableHandle] = []
    for name, module in model.named_modules():
        # The default keeps this module's name; a closure would read the loop's last one.
        def begin(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
            calls.append(_LayerCall(name, module, inputs[0], inputs[0]))
            open_calls.append(calls[-1])

        def end(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            open_calls.pop().after = output

        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    with torch.no_grad():
        features = model.features(images)
    for hook in hooks:
        hook.remove()
    return calls, features


def _place(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.numel()


def _alike(first: Tensor, second: Tensor) -> bool:
    return float((first - second).norm()) <= _SAME * float(second.norm())


def _is_linear(call: _LayerCall) -> bool:
    """Says whether a layer's outputs are one linear function of all of its input."""
    module = call.module
    if isinstance(module, nn.Linear):
        return call.before.ndim == 2
    assert isinstance(module, nn.Conv2d)
    if module.groups > 1 or module.dilation != (1, 1) or isinstance(module.padding, str):
        return False
    covered = all(
        size + padding <= kernel
        for size, padding, kernel in zip(
            call.before.shape[2:], module.padding, module.kernel_size, strict=True
        )
    )
    return covered and call.after.shape[2:] == (1, 1)


def _cut_reached(weight: Tensor, call: _LayerCall) -> Tensor:
    """Selects the part (m, n) of a layer's `weight` that meets its input, and not padding."""
    module = call.module
    if isinstance(module, nn.Conv2d) and not isinstance(module.padding, str):
        (top, left), (height, width) = module.padding, call.before.shape[2:]
        weight = weight[:, :, top : top + height, left : left + width]
    return weight.flatten(1)


_ROUNDING = 2.0**-24
"""Error of an entry in float32, over the gradient's root mean square."""
_VISIBLE = 3.0
"""Singular value over the largest one of mere noise, from which it is an image's."""
_CLEAR, _NOTHING = 5.0, 8.0
"""Least ratio of what the rows leave of other combinations to what they leave of the signal's; and
the most that they may leave of that, in standard deviations."""


@dataclass(frozen=True)
class Signal:
    """An image's error signal as a combination of the gradient's columns, as far as it is known."""

    combination: Tensor | None
    """(r,): coefficients of the gradient's columns, of unit length; None where several may be."""
    errors: Tensor | None = None
    """(r, r - 1): independent errors of the combination, a column for one standard deviation."""


@dataclass(frozen=True)
class RowSpace:
    """The strongest singular directions of a gradient, at their lengths, with errors alike."""

    rows: Tensor
    """(r, n), or (r, n + 1) with a bias, orthogonal."""
    columns: Tensor
    """(m, r), orthogonal. The gradient is columns @ diag(1 / lengths) @ rows."""
    lengths: Tensor
    """(r,): singular values, descending."""
    deviation: float
    """Standard deviation of the error of an entry: rounding, or noise."""
    separate: bool

    @staticmethod
    def decompose(layer: Layer, count: int) -> RowSpace:
        """Decomposes the gradient of `count` images into directions that noise does not hide."""
        rows, columns = layer.gradient.shape
        if count > min(rows, columns):
            raise AttackFailed(
                f"layer {layer.name} with weights of {rows} x {layer.weights.shape[1]} shows "
                f"{min(rows, columns)} inputs at most, and the update is of {count}"
            )
        left, lengths, right = torch.linalg.svd(layer.gradient, full_matrices=False)
        size = (rows * columns) ** 0.5
        rounding = _ROUNDING * float(lengths.norm()) / size
        # N images have rank N: what is beyond is noise or rounding.
        rest = lengths[count:]
        # Degrees of freedom of noise outside the rank-N part.
        spare = max(1, (rows - count) * (columns - count))
        deviation = max(float(rest.square().sum() / spare) ** 0.5, 0.1 * rounding)
        # Largest singular value of a matrix of mere noise (Marchenko and Pastur's edge).
        edge = deviation * (rows**0.5 + columns**0.5)
        visible = int((lengths[:count] > _VISIBLE * edge).sum())
        if not visible:
            raise AttackFailed(f"noise hides the row space of the gradient of layer {layer.name}")
        kept = lengths[:visible]
        return RowSpace(
            rows=kept[:, None] * right[:visible],
            columns=left[:, :visible] * kept,
            lengths=kept,
            deviation=deviation,
            separate=visible == count,
        )

    def signal(self, off: Tensor) -> Signal | None:
        """Finds the combination of columns that is 0 at the rows `off` (m,); None if none is."""
        number = int(off.sum())
        # Fewer rows than r always leave some combination that is 0 there.
        if number < self.rank:
            return Signal(None)
        _, lengths, right = torch.linalg.svd(self.columns[off], full_matrices=False)
        noise = self.deviation * number**0.5
        if float(lengths[-1]) > _NOTHING * noise:
            return None
        # Two directions that vanish at these rows leave the combination open.
        if self.rank > 1 and float(lengths[-2]) < _CLEAR * max(noise, float(lengths[-1])):
            return Signal(None)
        return Signal(right[-1], self.deviation * right[:-1].T / lengths[:-1])

    @property
    def rank(self) -> int:
        """Number r of directions."""
        return len(self.rows)
