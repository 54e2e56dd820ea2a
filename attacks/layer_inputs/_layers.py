"""Layers whose gradient is a product of their inputs, as a trace of the model finds them.

The gradient of a linear layer with weights W (m, n) and a batch of N inputs X (N, n) is

    ∂L/∂W = Δ' X        ∂L/∂b = Δ' 1        Δ = ∂L/∂Z (N, m)

so that its row space is that of the inputs, if there are at most m. A convolution whose output map
is a single pixel is such a layer, too: of the part of its input that its kernel covers. What inputs
tell of their images is put together here: pixels, features, labels, and how sure they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier, denormalize
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.classifier_features._certificates import exceeds_chance, is_declared
from fedsim_attacks.classifier_features._classifier_gradient import (
    ClassifierGradient,
    derive_signals,
)

_TRACED = 16  # images of noise that the model is traced with
_SPARSE = 0.05  # least share of zeros of inputs that ReLU has left
_SAME = 1e-4  # relative difference of features up to which they are the same
_RESCALED = (0.7, 1.3)  # factors of the first and last image: batch norm loses one that all share
_PART = 3  # images that are run without the others, to see whether their features stay the same


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Holds a linear layer, or a convolution to a single pixel, and its gradient in float64."""

    name: str
    weights: Tensor  # (m, n): m outputs of n inputs
    bias: Tensor | None  # (m,); None if the layer has none
    gradient: Tensor  # (m, n), of the mean loss in `weights`; (m, n + 1) with that in the bias
    pixels: bool  # whether its input is the normalized image itself
    nonnegative: bool  # whether its input is what ReLU has left: never negative, and often 0
    rectified: bool  # whether ReLU alone follows it
    fed_by: str | None
    """Name of the layer whose rectified output its input is; None if there is none."""
    length: float  # root mean square of its inputs' norms on images of noise
    features: Callable[[Tensor], Tensor] | None
    """Map from inputs (N, n) to features (N, d); None if those depend on more than that."""
    scale_free: bool  # whether features do not depend on the scale of its input


def trace_layers(observation: Observation) -> list[Layer]:
    """Finds the body's layers in the order of calls; AttackFailed if row spaces were changed."""
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


_Place = tuple[int, int]  # address and number of a tensor's values: the same for views of it


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
    images: Tensor  # any images: nothing of them reaches the features

    def __call__(self, inputs: Tensor) -> Tensor:

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


_ROUNDING = 2.0**-24  # error of an entry in float32, over the gradient's root mean square
_VISIBLE = 3.0  # singular value over the largest one of mere noise, from which it is an image's
_CLEAR, _NOTHING = 5.0, 8.0
"""Least ratio of what rows leave of other combinations to the signal's, and the most of that."""


@dataclass(frozen=True)
class Signal:
    """Holds an image's error signal as a combination of the gradient's columns, if it is known."""

    combination: Tensor | None
    """(r,): coefficients of the gradient's columns, of unit length; None where several may be."""
    errors: Tensor | None = None
    """(r, r - 1): independent errors of the combination, a column for one standard deviation."""


@dataclass(frozen=True)
class RowSpace:
    """Holds the strongest singular directions of a gradient, at their lengths."""

    rows: Tensor  # (r, n), or (r, n + 1) with a bias, orthogonal
    columns: Tensor  # (m, r), orthogonal. The gradient is columns @ diag(1 / lengths) @ rows.
    lengths: Tensor  # (r,): singular values, descending
    deviation: float  # standard deviation of the error of an entry of either: rounding, or noise
    separate: bool  # whether there is a direction for each image

    @staticmethod
    def decompose(layer: Layer, count: int) -> RowSpace:
        """Decomposes the gradient of `count` images, less what noise hides; AttackFailed if all."""
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
        """Finds the combination of columns that is 0 at the rows `off`, a mask (m,).

        Returns None if none is 0 there, and a signal without `combination` if several may be.
        """
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
        return len(self.rows)


_SURE = 3.0  # standard deviations by which features may be off
_DETERMINED = 0.03  # relative error up to which an input is determined
_CONSISTENT = 0.02  # relative error of an image's error signal that its own features imply

_WIDTHS = (4.0, 2.0, 1.0, 0.0)
"""Distances from 0, in standard deviations, within which an input counts as 0; tried in turn."""


@dataclass(frozen=True)
class Inputs:
    """Holds inputs of a layer, one for each image that was found."""

    layer: Layer
    values: Tensor  # (k, n): the n entries of each input, with their true norms
    errors: Tensor  # (k,): root of the summed variances of an input's entries, over its norm
    separate: bool
    """Whether the gradient has a direction for each image: else any found may be a mixture."""

    @property
    def certain(self) -> Tensor:
        """Boolean mask (k,) of the inputs whose relative error is surely below 3 %."""
        return (_SURE * self.errors < _DETERMINED) & self.separate


def recover_earlier(inputs: Inputs, layers: list[Layer], count: int) -> Inputs | None:
    """Recovers the inputs of all `count` images one layer before their known `inputs`.

    Inputs that do not reproduce the known ones get infinite errors. None if none of `layers` with
    a bias feeds that one, or its gradient does not tell.
    """
    # Where ReLU has left an input 0, that image's error signal at the layer before is 0, too. This
    # tells each image's combination of the gradient's columns, whose inverse gives the inputs.
    before = next((layer for layer in layers if layer.name == inputs.layer.fed_by), None)
    # Without the gradient in the bias an input has no scale.
    if before is None or before.bias is None:
        return None
    try:
        space = RowSpace.decompose(before, count)
    except AttackFailed:
        return None
    if space.rank < count:
        return None
    values = inputs.values
    error = inputs.errors * values.norm(dim=1) / values.shape[1] ** 0.5
    rounding = 1e-6 * values.amax(1)
    combinations = []
    for row, near, least in zip(values, error, rounding, strict=True):
        for width in _WIDTHS:  # the narrower, the fewer inputs near 0 are taken for 0
            off = row < width * near + least
            signal = space.signal(off)
            if signal is not None and signal.combination is not None:
                break
        else:
            return None
        combinations.append(signal.combination)
    found = disaggregate(before, space, torch.stack(combinations))
    # The layer is run again: an input that does not make the known output was read wrongly.
    outputs = (found.values @ before.weights.T + before.bias).clamp_min(0)
    wrong = (outputs - values).norm(dim=1) > _CONSISTENT * values.norm(dim=1)
    found.errors[wrong] = torch.inf
    return found


def disaggregate(layer: Layer, space: RowSpace, combinations: Tensor) -> Inputs:
    """Computes inputs to `layer`, which has a bias, from the images' error signals.

    `combinations` (r, r) of columns of `space` make these up to scale, in a row for each image.
    """
    # The gradient is ∂L/∂W = Δ' X, and the bias's gradient, its last column, sets the scale.
    # Δ' = columns Q' leaves X = Q'⁻¹ diag(1 / lengths) rows.
    whole = torch.linalg.pinv(combinations.T) @ (space.rows / space.lengths[:, None])
    scale = whole[:, -1:]
    signals = (space.columns @ combinations.T) * scale.T
    spread = space.deviation * torch.linalg.pinv(signals).norm(dim=1)
    values = whole[:, :-1] / scale
    errors = spread * values.shape[1] ** 0.5 / values.norm(dim=1)
    return Inputs(layer, values, errors, space.separate)


def inputs_drift(observation: Observation) -> bool:
    """Says whether several local steps have changed the inputs of all layers but the first."""
    # A drift in one direction keeps the row space, and nothing shows how far it went.
    return len(step_weights(observation.training)) > 1


def build_answer(
    observation: Observation, inputs: Inputs, pixels: Inputs | None, iterations: int
) -> Reconstruction:
    """Returns features that follow from `inputs`; means stand for images that were not found.

    Args:
        observation: the attacked update.
        inputs: inputs found of a layer from which all features follow.
        pixels: inputs of the first layer, which are the images; None returns no images.
        iterations: iterations that it took, for the answer.
    """
    assert inputs.layer.features is not None
    features = inputs.layer.features(inputs.values)
    count, found = observation.num_images, len(features)
    certain = inputs.certain & (inputs.layer.pixels or not inputs_drift(observation))
    # The mean is the least wrong where nothing is known, and takes part in no certificate.
    missing = features.mean(0, keepdim=True).expand(count - found, -1)
    whole = torch.cat([features.double(), missing.double()])
    classifier = ClassifierGradient.read(observation)
    implied_labels = derive_signals(classifier, whole)[0]
    wrong, loss = _find_inconsistent(classifier, whole, implied_labels)
    if found == count:
        certain = certain & ~wrong
    images = None
    if pixels is not None:
        shape = (-1, *observation.model.input_shape)
        shown = denormalize(pixels.values.float().view(shape), observation.model).clamp(0, 1)
        images = torch.cat(
            [shown, shown.mean(0, keepdim=True).expand(count - len(shown), *shape[1:])]
        )
        certain = certain & pixels.certain[: len(certain)]
    return Reconstruction(
        images=images,
        features=whole.float(),
        labels=implied_labels if found == count else None,
        determined=torch.cat([certain, certain.new_zeros(count - found)]),
        loss=loss,
        iterations=iterations,
    )


def _find_inconsistent(
    classifier: ClassifierGradient, features: Tensor, labels: Tensor
) -> tuple[Tensor, float]:
    """Returns a mask (N,) of images whose signals contradict their features, and the share left."""
    count, classes = len(features), len(classifier.weights)
    whole = classifier.with_constant(features)
    inverse = torch.linalg.pinv(whole.T)
    read = count * inverse @ classifier.gradient.T
    errors = (whole @ classifier.weights.T).softmax(1) - F.one_hot(labels, classes)
    scale = classifier.fit_scale(read, errors)
    # What noise in each of K entries makes of an error signal, through the inverse.
    noise = classes**0.5 * count * classifier.deviation * inverse.norm(dim=1)
    allowed = _CONSISTENT * read.norm(dim=1) + 5 * noise
    wrong = ((read - scale * errors).norm(dim=1) > allowed) | (noise > read.norm(dim=1))
    left = classifier.gradient - (scale * errors).T @ whole / count
    return wrong, float(left.square().sum() / classifier.gradient.square().sum())


_ROUNDINGS = 8.0
"""Residual that certified features may leave, over the rounding of each image's part."""


def certify_inputs(observation: Observation, answer: Reconstruction) -> Tensor:
    """Returns a mask (N,), all or none, of images known to be right in a `build_answer`."""
    classifier = ClassifierGradient.read(observation)
    assert answer.determined is not None
    assert answer.features is not None
    columns = classifier.gradient.shape[1]
    whole = classifier.with_constant(answer.features.double())
    # Each image's part of the gradient is an outer product: its norm is that of both vectors.
    shares = torch.linalg.pinv(whole.T) @ classifier.gradient.T
    # Images that cancel each other leave of the gradient less than its entries were rounded by.
    terms = float((shares.norm(dim=1) * whole.norm(dim=1)).sum() / classifier.gradient.norm())
    sure = (
        is_declared(classifier)
        and bool(answer.determined.all())
        and answer.loss <= (_ROUNDINGS * classifier.rounding * terms) ** 2
        and exceeds_chance(classifier, columns, classifier.factors, answer.loss)
    )
    return torch.full_like(answer.determined, sure)
