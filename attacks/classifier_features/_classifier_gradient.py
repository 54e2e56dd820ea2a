"""What the gradient of a linear softmax classifier shows of the features of its batch.

With logits z_i = W x_i + b of N images of K classes and the mean cross-entropy, the error signals
are D_ik = p_ik - y_ik, and

    ∂L/∂W = (1/N) Σ_i D_i x_i'        ∂L/∂b = (1/N) Σ_i D_i

Both are the gradient of a classifier whose features end with a 1: so they are treated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.models.victim import rebuild
from fedsim.types import Observation
from fedsim.words import number_of

_LARGEST_BATCH = 128  # images at once, at most: unknowns are their square

_FINEST, _COMPARED, _OFF = 1 << 12, 64, 0.01
"""Levels up to the least entry of a grid; values that tell it; and how far off float32 may be."""


@dataclass(frozen=True, kw_only=True)
class ClassifierGradient:
    """Holds the classifier's weights and the observed mean gradient of them, in float64."""

    weights: Tensor  # [W b] (K, d + 1), or W (K, d) if it has no bias
    gradient: Tensor  # gradient of the mean loss in `weights`
    biased: bool  # whether the last feature is the constant 1
    num_images: int
    factors: int
    """Number of clipping's unknown factors in (0, 1]: 0, 1, or N (one for each image)."""
    removed: bool  # whether a defense set entries of the gradient to zero
    mixed: bool
    """Whether a defense mixed entries, so that one depends on those at other positions."""
    noisy: bool
    exact: bool  # whether the row space of the gradient is as the client computed it
    dropout: bool  # whether each image met other features (dropout)
    rates: tuple[float, ...]
    """Learning rate of each local step but the last, if all are on the same batch; else empty."""
    momentum: float
    bias_weight: float = 1.0
    """Spacing of the weights' gradient's grid over that of the bias's; 1 if either is not known."""
    removed_below: Tensor | None = None
    """(d + 1,): magnitude that removed entries of a column had at most, infinite if unknown."""
    divisor: float = 1.0  # always 1: only a two-layer head divides its logits
    rounding: float = 2.0**-24
    """Relative rounding error of an entry, in the type that the update was sent in."""
    grid: float = 0.0
    """Spacing of the grid that the weights' gradient was rounded to; 0 if none is known."""
    approximation: float = 0.0
    """Relative root mean square error of an entry if the gradient is an approximation; else 0."""

    @staticmethod
    def read(observation: Observation) -> ClassifierGradient:
        """Reads the mean gradient of the update's steps; AttackFailed if it has no classifier's."""
        layer, name = _linear_classifier(rebuild(observation))
        if f"{name}.weight" not in observation.update:
            raise AttackFailed(
                "features are read off the classifier's weights, which were not trained, or are "
                "not sent: use an attack that compares the update of other layers"
            )
        effect, training = observation.effect, observation.training
        # An update is -lr times a weighted sum of gradients; the factor turns it into their mean.
        factor = mean_gradient_factor(training)
        parts = [(layer.weight, f"{name}.weight")]
        biased = layer.bias is not None and f"{name}.bias" in observation.update
        if biased:
            parts.append((layer.bias, f"{name}.bias"))
        weights = [part.detach().double().reshape(len(layer.weight), -1) for part, _ in parts]
        # One bound for each column: the weights have d, the bias has one.
        below = [
            bound
            for part, key in parts
            for bound in [_smallest(observation, key) * abs(factor)] * part[0].numel()
        ]
        gradient = [
            observation.update[key].detach().double().reshape(len(layer.weight), -1) * factor
            for _, key in parts
        ]
        grids = [_grid(observation, key) for _, key in parts]
        return ClassifierGradient(
            weights=torch.cat(weights, 1),
            gradient=torch.cat(gradient, 1),
            biased=biased,
            num_images=observation.num_images,
            factors=observation.num_images if effect.scaled_examples else int(effect.scaled),
            removed=effect.removed is not None,
            mixed=effect.mixed,
            noisy=effect.noisy,
            exact=effect.exact and training.sums_gradients,
            dropout=training.dropout > 0,
            rates=(training.lr,) * (len(step_weights(training)) - 1)
            if training.batches == "same"
            else (),
            momentum=training.momentum,
            # The grid of the bias's gradient may be finer than that of the weights'.
            bias_weight=grids[0] / grids[1] if biased and all(grids) else 1.0,
            removed_below=weights[0].new_tensor(below),
            grid=grids[0] * abs(factor),
            rounding=max(torch.finfo(observation.update[key].dtype).eps / 2 for _, key in parts),
        )

    def check(self) -> None:
        """Refuses a gradient that does not determine the features, as AttackFailed."""
        if not bool(self.weights.isfinite().all()):
            raise AttackFailed("weights of the classifier are not finite")
        if self.mixed:
            raise AttackFailed(
                "a defense mixes entries, and what is left of the classifier's gradient has not "
                "the features' row space"
            )
        if self.dropout:
            raise AttackFailed("dropout before the classifier gives each image another classifier")
        if not bool(self.gradient.any()):
            raise AttackFailed("nothing is left of the update of the classifier")
        if self.excess:
            raise AttackFailed(self.excess)
        if self.num_images > _LARGEST_BATCH:
            raise AttackFailed(
                f"features are sought of {number_of(_LARGEST_BATCH, 'image')} at once, and the "
                f"update is of {self.num_images}"
            )

    @property
    def excess(self) -> str:
        """Reason why the gradient cannot tell this number of images apart; empty if it can."""
        classes = len(self.weights)
        # Error signals sum to 0 over the classes, so that D has rank K - 1 at most.
        most = min(classes - 1, self.gradient.shape[1])
        if self.num_images <= most:
            return ""
        return (
            f"a classifier of {number_of(classes, 'class', 'classes')} determines the features of "
            f"{number_of(most, 'image')} at most, and the update is of {self.num_images}; "
            "extreme_rays may read more off a layer before it"
        )

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of the noise or rounding error in an entry of `gradient`."""
        # Σ_k D_ik = 0 of every image, hence of every column: what is left is the noise of K
        # entries.
        sums = self.gradient.sum(0)
        added = float(sums.square().mean().sqrt()) / math.sqrt(len(self.gradient))
        # Errors that are uniform over a spacing have a standard deviation of spacing / √12.
        added = max(added, self.grid / math.sqrt(12))
        return math.hypot(added, self.approximation * float(self.gradient.square().mean().sqrt()))

    @property
    def unique(self) -> bool:
        """Whether the gradient gives more equations than there are unknowns."""
        # With equally many, several solutions are exact, and their labels differ.
        images = self.num_images
        if images == 1 and self.biased:
            return True
        # In the row space the gradient has N columns of K - 1 free entries each.
        equations = images * (len(self.weights) - 1)
        return equations > images * (images - int(self.biased)) + self.factors

    @property
    def quotient(self) -> Tensor | None:
        """Features (d,) of a single image in closed form; None for several, or no bias gradient."""
        # With the error signal D, ∂L/∂W = D x' and ∂L/∂b = D: x is fitted by least squares.
        if self.num_images > 1 or not self.biased:
            return None
        signals = self.gradient[:, -1]
        energy = float(signals.square().sum())
        return signals @ self.gradient[:, :-1] / energy if energy else None

    def fit_scale(self, read: Tensor, errors: Tensor) -> Tensor:
        """Fits clipping's factors, (1, 1) or (N, 1): `read` over unclipped `errors` (N, K)."""
        if not self.factors:
            return read.new_ones(1, 1)
        # Least squares of read ≈ c · errors, over all entries or over each image's.
        over = (0, 1) if self.factors == 1 else 1
        return (read * errors).sum(over, keepdim=True) / errors.square().sum(over, keepdim=True)

    def with_constant(self, features: Tensor) -> Tensor:
        """Appends the constant 1 to `features` (..., d) if the classifier has a bias."""
        return F.pad(features, (0, 1), value=1.0) if self.biased else features

    @property
    def noise(self) -> float:
        """Variance of noise, rounding or approximation in an entry; 0 where none is declared."""
        # Where entries were removed, columns no longer show the noise.
        exact = self.exact and not self.approximation
        return 0.0 if exact or self.removed else self.deviation**2


def _smallest(observation: Observation, name: str) -> float:
    """Returns the magnitude that entries of `name` set to zero had at most; infinite if unknown."""
    removed = observation.effect.removed
    if removed not in ("smallest", "smallest_of_tensor") or observation.effect.noisy:
        return math.inf
    names = [name] if removed == "smallest_of_tensor" else list(observation.update)
    kept = [t[t != 0].abs().min() for t in (observation.update[n] for n in names) if bool(t.any())]
    return float(torch.stack(kept).min()) if kept else math.inf


def _grid(observation: Observation, name: str) -> float:
    """Returns the spacing of the values that entries of `name` were rounded to; 0 if not known."""
    effect, tensor = observation.effect, observation.update[name]
    if not effect.rounded or effect.noisy or effect.removed or not bool(tensor.any()):
        return 0.0
    values = tensor.double().abs().flatten().sort()[0]
    values = values[values > 0]
    # The least entry is a whole number of spacings: the first that fits all others is the grid.
    spacings = values[0] / torch.arange(1, _FINEST, dtype=values.dtype, device=values.device)
    chosen = torch.linspace(0, len(values) - 1, _COMPARED).long()
    levels = values[chosen][:, None] / spacings
    fits = ((levels - levels.round()).abs() < _OFF).all(0)
    # Spacings fall, so that the first that fits is the largest.
    return float(spacings[fits.double().argmax()])


def _linear_classifier(model: Classifier) -> tuple[nn.Linear, str]:
    """Returns the linear layer that is the whole head, and its name; AttackFailed without one."""
    found = [(m, n) for n, m in model.head.named_modules() if isinstance(m, nn.Linear)]
    others = [
        m
        for m in model.head.modules()
        if not list(m.children()) and next(m.parameters(), None) is not None
        if not isinstance(m, nn.Linear)
    ]
    if len(found) != 1 or others:
        raise AttackFailed(
            "features are fitted to an ordinary classifier, and the model's head is not one linear "
            "layer"
        )
    layer, name = found[0]
    return layer, f"head.{name}".rstrip(".")


def derive_signals(
    classifier: ClassifierGradient, features: Tensor, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Derives labels, signals ∂L/∂x (N, d) and clipping's factor from `features` (N, d).

    Labels are (N,), those `known` if any, and `features` are in their true lengths. The factor
    (0-d) is 1 where each image has its own, which is then part of its signal.
    """
    # A label is the class whose signal in the gradient is farthest below its probability.
    whole = classifier.with_constant(features.double())
    # ∂L/∂[W b] = D'X / N solved for D (N, K), by least squares.
    read = classifier.num_images * torch.linalg.pinv(whole.T) @ classifier.gradient.T
    probabilities = (whole @ classifier.weights.T).softmax(1)
    labels = read.argmin(1) if known is None else known
    # The scale needs labels and labels need the scale: the first labels take it for 1.
    for _ in range(2):
        errors = probabilities - F.one_hot(labels, probabilities.shape[1])
        scale = classifier.fit_scale(read, errors)
        if known is None:
            labels = (read / scale - probabilities).argmin(1)
    errors = probabilities - F.one_hot(labels, probabilities.shape[1])
    weights = classifier.weights[:, :-1] if classifier.biased else classifier.weights
    # ∂L/∂x_i = W'D_i / N, which backpropagation hands on to the body.
    signals = errors @ weights / classifier.num_images
    if classifier.factors > 1:
        signals, scale = scale * signals, read.new_ones(1, 1)
    return labels, signals.to(features.dtype), scale[0, 0].to(features.dtype)
