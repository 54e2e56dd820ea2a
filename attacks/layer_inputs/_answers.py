"""What inputs of a layer tell of their images: pixels, features, labels, and how sure they are.

Certificates of batches whose inputs were all found: that features and labels are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import denormalize
from fedsim.models.local import step_weights
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.classifier_features._certificates import exceeds_chance, is_declared
from fedsim_attacks.classifier_features._classifier_gradient import (
    ClassifierGradient,
    derive_signals,
)
from fedsim_attacks.layer_inputs._layers import Layer, RowSpace

_SURE = 3.0
"""Standard deviations by which features may be off."""
_DETERMINED = 0.03
"""Relative error up to which an input is determined."""
_CONSISTENT = 0.02
"""Relative error of an image's error signal that its own features imply."""

_WIDTHS = (4.0, 2.0, 1.0, 0.0)
"""Distances from 0, in standard deviations, within which an input counts as 0; tried in turn."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a layer, one for each image that was found."""

    layer: Layer
    values: Tensor
    """(k, n): the n entries of each input, with their true norms."""
    errors: Tensor
    """(k,): root of the summed variances of an input's entries, over its norm."""
    separate: bool
    """Whether the gradient has a direction for each image: else any found may be a mixture."""

    @property
    def certain(self) -> Tensor:
        """Boolean mask (k,) of the inputs whose relative error is surely below 3 %."""
        return (_SURE * self.errors < _DETERMINED) & self.separate


def recover_earlier(inputs: Inputs, layers: list[Layer], count: int) -> Inputs | None:
    """Recovers inputs of the layer before that of `inputs`; None if it is not told."""
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
    """Computes inputs from `combinations` (r, r), one a row, of the gradient's columns."""
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
    observation: Observation,
    inputs: Inputs,
    pixels: Inputs | None,
    features: Tensor,
    iterations: int,
) -> Reconstruction:
    """Returns images, features and labels; means stand for images that were not found.

    Images are returned if the first layer's inputs, `pixels`, led to the `features` (k, d). Labels
    are read off all features together, and none where one is missing. Over several local steps only
    images stay as they are: what other inputs tell is never called determined.
    """
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
"""Residual of the classifier's gradient that certified features may leave, over the rounding of
what each image adds to it: they come through the network in float32."""


def certify_inputs(observation: Observation, answer: Reconstruction) -> Tensor:
    """Returns a mask (N,) of the images whose answer is known to be right: all, or none."""
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
