"""Images regressed on the features that the head's gradient gives away.

Whoever has images of the kind that clients hold can run them through the model that the server
sent, and regress them on their features (ridge regression; its strength by generalized
cross-validation: Golub, Heath and Wahba, Technometrics 1979). Of a victim's features that gives an
image, blurred, in seconds (Dosovitskiy and Brox, Inverting Visual Representations with
Convolutional Networks, CVPR 2016, with a linear map), also behind noise. What is left of the public
images says how far, and in which directions, it may be off: a prior.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.models.local import features_of
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.images_from_features._heads import are_determined, head_of, recover, signals

_SIDE = 16  # side of a distribution's images in pixels, at most: finer detail is not in features
_CHUNK = 256
"""Public images at a time: with batch norm in train mode, those whose statistics they share."""
_STRENGTHS: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-12, 5))
"""Strengths of the ridge, over the mean variance of a feature."""
_LEAST_VARIANCE = 1e-3
"""Least variance of a normalized pixel in any direction: rounding and compression."""
_ROUNDING = 1e-12  # share of the targets' energy below which a residual is rounding (float32)
_TIE = 1e-6  # relative difference of cross-validated errors up to which they are the same


@final
class ImageDistribution:
    """Normal distributions of N images, with one covariance for all and a mean for each.

    A call with normalized images (N, C, H, W) returns how unlikely they are (0-d, 1 for a draw),
    and its gradient in them.
    """

    def __init__(self, means: Tensor, precision: Tensor, shape: torch.Size) -> None:
        """Takes `means` (N, C, h, w), normalized, of images of `shape` (H, W) averaged to (h, w).

        `precision` is the inverse covariance (C h w, C h w).
        """
        self._means, self._precision, self._shape = means, precision, shape

    @property
    def means(self) -> Tensor:
        """Images (N, C, H, W), normalized, of least expected squared error."""
        if self._means.shape[2:] == self._shape:
            return self._means.clone()
        return F.interpolate(self._means, tuple(self._shape), mode="bilinear")

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes how unlikely normalized `images` are (0-d), 1 for a draw, and its slope."""
        with torch.enable_grad():
            variable = images.detach().requires_grad_()
            # Compared at the small size: the distribution says nothing of finer detail.
            away = (_small(variable) - self._means).flatten(1)
            energy = ((away @ self._precision) * away).mean()
            (slope,) = torch.autograd.grad(energy, variable)
        return energy.detach(), slope


@final
class ImagePrior:
    """Holds the distribution of public images, and that of images whose features are known."""

    def __init__(self, observation: Observation, images: Tensor) -> None:
        """Computes features of public `images` (P, C, H, W), uint8, by the observed model.

        An AttackFailed refuses fewer than two images, or another shape than the victim's.
        """
        if images.shape[1:] != observation.model.input_shape or len(images) < 2:
            raise AttackFailed(
                f"the public images are {tuple(images.shape)}, and a regression on features takes "
                f"two or more of {observation.model.input_shape}"
            )
        features, self._targets = _features_and_pixels(observation, images)
        self._center = features.mean(0)
        self._mean = self._targets.mean(0)
        self._targets -= self._mean
        self._inputs = features - self._center
        self._shape = images.shape[2:]
        self._regression: tuple[Tensor, Tensor] | None = None

    def given_features(self, features: Tensor) -> ImageDistribution:
        """Returns the distribution of N images whose features are `features` (N, d)."""
        if self._regression is None:
            # What the regression leaves of public images is the covariance given features.
            weights, residuals = _ridge(self._inputs, self._targets)
            self._regression = weights, _precision(residuals)
        weights, precision = self._regression
        # Conditional mean of a joint normal distribution: linear in the features.
        means = self._mean + (features - self._center) @ weights
        return self._distribution(means, precision)

    def unconditional(self, count: int) -> ImageDistribution:
        """Returns the distribution of `count` images whose features are not known."""
        return self._distribution(self._mean.expand(count, -1), _precision(self._targets))

    def _distribution(self, means: Tensor, precision: Tensor) -> ImageDistribution:
        means = means.view(len(means), -1, *_small_sides(*self._shape))
        return ImageDistribution(means.contiguous(), precision, self._shape)


def _features_and_pixels(observation: Observation, images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes features (P, d) of public `images`, and these normalized and small (P, C h w)."""
    device = observation.device
    model, training = rebuild(observation), observation.training
    features, targets = [], []
    # Batch norm cannot train on a last chunk of a single image.
    for part in images.chunk(-(-len(images) // _CHUNK)):
        pixels = normalize(part.to(device).float() / 255, observation.model)
        features.append(
            features_of(model, observation.parameters, observation.buffers, pixels, training)
        )
        targets.append(_small(pixels).flatten(1))
    return torch.cat(features), torch.cat(targets)


def _small(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    sides = _small_sides(height, width)
    return images if sides == (height, width) else F.adaptive_avg_pool2d(images, sides)


def _small_sides(height: int, width: int) -> tuple[int, int]:
    return min(_SIDE, height), min(_SIDE, width)


def _ridge(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Regresses (P, p) on centered (P, d): weights (d, p), and residuals as of other images."""
    left_vectors: Tensor
    values: Tensor
    left_vectors, values, right = torch.linalg.svd(inputs.double(), full_matrices=False)
    projected = left_vectors.T @ targets.double()  # (r, p)
    energies = projected.square().sum(1)
    # What no ridge explains is summed by itself: as a difference of sums it would be rounding.
    beyond = (targets - left_vectors @ projected).square().sum()
    rounding = _ROUNDING * float(targets.double().square().sum())
    scale = (values.square().sum() / inputs.shape[1]).clamp_min(torch.finfo(torch.float32).tiny)
    # Centering takes one degree of freedom.
    freedom = len(inputs) - 1

    def shrinkage(strength: float) -> Tensor:
        """Computes the share that the ridge removes of each direction: (r,)."""
        return strength * scale / (values.square() + strength * scale)

    def freedom_left(strength: float) -> float:
        """Computes the share of the degrees of freedom that remains to the residuals."""
        left_vectors = freedom - len(values) + float(shrinkage(strength).sum())
        return max(left_vectors / freedom, _ROUNDING)

    def error(strength: float) -> float:
        residual = float(beyond + (shrinkage(strength).square() * energies).sum())
        # Golub, Heath and Wahba 1979: |residual|² / (trace of what the ridge leaves)².
        return max(residual, rounding) / freedom_left(strength) ** 2

    errors = {strength: error(strength) for strength in _STRENGTHS}
    least = min(errors.values())
    # The strongest of several that are as good.
    strength = max(s for s, each in errors.items() if each <= (1 + _TIE) * least)
    inverse = values / (values.square() + strength * scale)
    weights = (right.T @ (inverse[:, None] * projected)).to(inputs)
    residuals = targets - inputs @ weights
    # Fitted residuals are too small: divided by what is left of freedom, as of images not seen.
    return weights, residuals / freedom_left(strength)


def _precision(samples: Tensor) -> Tensor:
    """Estimates the inverse covariance (p, p) of centered `samples` (P, p), by shrinkage."""
    from sklearn.covariance import oas  # seconds to import, for few

    covariance = torch.from_numpy(oas(samples.cpu().numpy(), assume_centered=True)[0])
    # Directions without variance in a few public images are not impossible.
    covariance.diagonal().add_(_LEAST_VARIANCE)
    return torch.cholesky_inverse(torch.linalg.cholesky(covariance)).to(samples)


_MIXED = 0.3
"""Share of their difference that two features may have exchanged: images are then blends."""


@final
class FeatureRegression(DirectAttack):
    """Recovers features, and guesses their images by a regression on public ones.

    The guess is that of least squared error among those linear in the features. Where the head's
    gradient leaves features in doubt, it is the mean of the public images. Nothing is optimized.
    """

    paper: ClassVar[str] = (
        "fedsim: features by best_features; images from features after Dosovitskiy and Brox, "
        "Inverting Visual Representations with Convolutional Networks, CVPR 2016, by ridge "
        "regression"
    )
    needs: ClassVar[Grant] = Grant.least(public="test")

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns images, labels, features and the features' loss.

        An AttackFailed says that public images do not fit, or that no features were recovered.
        """
        assert knowledge.public_images is not None
        prior = ImagePrior(observation, knowledge.public_images)
        seed = int(torch.randint(2**31, (), generator=rng))
        recovered = recover(observation, knowledge, seed)
        assert recovered.features is not None
        distribution = prior.unconditional(len(recovered.features))
        if are_determined(head_of(observation), recovered.features, _MIXED):
            distribution = prior.given_features(recovered.features)
        return Reconstruction(
            images=Matching(observation).pixels(distribution.means),
            labels=signals(observation, recovered.features).labels,
            features=recovered.features,
            features_by=recovered.features_by,
            loss=recovered.loss,
            iterations=0,
        )
