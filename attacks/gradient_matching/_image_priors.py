"""What candidates are held to beside the update: variation, contrast, features and statistics.

Contrast: behind a first convolution without bias and group norm, multiples of an image have the
same gradient, and behind any other group norm nearly so: total variation then takes contrast away.
But photographs are exposed: the largest multiple of which all pixels are valid is the image itself
for most of them (for three quarters of 2,000 of CIFAR-10). Where an image is mostly guessed, less
contrast is nearer to the truth.

Features: Liu et al., Data Reconstruction Attacks and Defenses, equation 2. Batch norm's statistics:
Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021, equation 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.local import features_function
from fedsim.models.victim import rebuild
from fedsim.types import ModelSpec, Observation

Variation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from images (N, C, H, W) to their variation (0-d) and its gradient in them."""

_OPPONENTS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (0.5, -1.0, 0.5))
"""Brightness, and two directions of color."""
_COLOR = 3.0  # weight of a difference in color; one in brightness has weight 1


def total_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean absolute difference of neighbouring pixels of `images` (N, C, H, W).

    Returns it (0-d), summed over both directions, and its gradient in the images.
    """
    slope = torch.zeros_like(images)
    for difference, later, earlier in (
        (images[:, :, 1:] - images[:, :, :-1], slope[:, :, 1:], slope[:, :, :-1]),
        (images[..., 1:] - images[..., :-1], slope[..., 1:], slope[..., :-1]),
    ):
        sign = difference.sign_().div_(max(1, difference.numel()))
        later += sign
        earlier -= sign
    # It scales with the images: by Euler's theorem it is the product with its own gradient.
    return torch.dot(slope.flatten(), images.flatten()), slope


def chromatic_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `total_variation`, with three channels' color counted three times, and its slope."""
    if images.shape[1] != len(_OPPONENTS):
        return total_variation(images)
    directions = images.new_tensor(_OPPONENTS)
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    directions[1:] *= _COLOR
    turned = torch.einsum("kc,nchw->nkhw", directions, images).contiguous()
    variation, slope = total_variation(turned)
    # Chain rule: the transpose of the turn brings the slope back to channels.
    return variation, torch.einsum("kc,nkhw->nchw", directions, slope).contiguous()


_TINY = 1e-8  # length of a step below which its slope, else undefined, goes to 0


def _opponent_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean step to the next pixel of channels and their differences, and its slope."""
    # As in breaching's `modern` attack: TotalVariation with inner_exp 2, outer_exp 0.5.
    pairs = list(combinations(range(images.shape[1]), 2))
    mixing = torch.eye(images.shape[1], dtype=images.dtype, device=images.device)
    mixing = torch.cat([mixing, *(mixing[a : a + 1] - mixing[b : b + 1] for a, b in pairs)])
    maps = torch.einsum("kc,nchw->nkhw", mixing, images)
    # Beyond the last row and column there is 0, so that the difference there is -x.
    down, right = -maps, -maps
    down[:, :, :-1] += maps[:, :, 1:]
    right[..., :-1] += maps[..., 1:]
    length = torch.hypot(down, right)
    # ∂√(a² + b²) = (a, b) / √(a² + b²), and the mean over all pixels of all maps.
    scale = (length.clamp_min(_TINY) * length.numel()).reciprocal_()
    down *= scale
    right *= scale
    slope = -down - right
    slope[:, :, 1:] += down[:, :, :-1]
    slope[..., 1:] += right[..., :-1]
    return length.mean(), torch.einsum("kc,nkhw->nchw", mixing, slope).contiguous()


VARIATIONS: dict[str, Variation] = {
    "absolute": total_variation,
    "chromatic": chromatic_variation,
    "opponents": _opponent_variation,
}
"""Variations by the names that attacks' parameters have for them."""


_VALID = 0.999  # share of the pixels that are to be valid: a few of a reconstruction are off


_INFORMED = 3.0  # factor of the first gradient's signal-to-noise ratio at which contrast is trusted


def valid_range(spec: ModelSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns normalized 0 and 1: each (C, 1, 1) for images, (D,) for rows; typed as `like` is."""
    first, *inner = spec.input_shape
    single = [1] * len(inner)
    ends = torch.tensor([0.0, 1.0], dtype=like.dtype, device=like.device).view(2, 1, *single)
    low, high = normalize(ends.expand(2, first, *single), spec)
    return low, high


def exposure_factors(images: Tensor, box: tuple[Tensor, Tensor], contrast: float = 1.0) -> Tensor:
    """Computes factors (N, 1, 1, 1) by which `images` fill `box`, times `contrast` in [0, 1].

    `box` has the normalized pixels 0 and 1, (C, 1, 1) each, between which one entry in 1,000 of
    an image need not stay.
    """
    low, high = box
    # `low` is negative, `high` positive: each pixel's share of the way to the end that it faces.
    share = torch.maximum(images / low, images / high).flatten(1).quantile(_VALID, dim=1)
    return contrast / share.clamp_min(torch.finfo(share.dtype).tiny).view(-1, 1, 1, 1)


def expose(images: Tensor, box: tuple[Tensor, Tensor], contrast: float = 1.0) -> Tensor:
    """Multiplies normalized `images` (N, C, H, W) by their `exposure_factors`."""
    return exposure_factors(images, box, contrast) * images


def trusted_contrast(noise: float) -> float:
    """Computes the contrast, in [0, 1], nearest to the truth for a share of `noise` in energy."""
    # An estimate whose correlation with the truth is c is nearest to it at contrast c.
    clear = _INFORMED * max(0.0, 1 - noise)
    return math.sqrt(clear / (noise + clear))


class KnownFeatures(NamedTuple):
    """Features (N, d) that the images are known to have, in their order."""

    values: Tensor  # (N, d)
    measure: Literal["squared_cosine", "relative"]
    """Comparison of features: by direction alone, or by distance."""
    trust: Tensor | float = 1.0  # (N,): weight of each image's misfit; or one weight for all
    known: Tensor | float = 1.0
    """(d,): 1 for entries whose distances count, and 0 for others; or 1 for all."""

    def misfit(self, features: Tensor) -> Tensor:
        """Computes the mean over images (0-d) of 1 - cos² or |x - f|² / |f|², times their trust."""
        if self.measure == "squared_cosine":
            away = 1 - F.cosine_similarity(features, self.values).square()
        else:
            away = ((features - self.values) * self.known).square().sum(
                1
            ) / self.values.square().sum(1)
        return (self.trust * away).mean()


@final
class ForwardPrior:
    """Weighted misfits of known features and of granted statistics, and their slope in images."""

    def __init__(
        self,
        observation: Observation,
        knowledge: Knowledge,
        features: KnownFeatures | None,
        *,
        feature_weight: float = 1.0,
        batch_norm: float = 0.0,
        views: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepares both misfits.

        Args:
            observation: The victim's model, and how it computes.
            knowledge: Grant of batch norm's statistics.
            features: Features that the images are known to have; None for none.
            feature_weight: Factor of the misfit of features.
            batch_norm: Factor of the misfit of statistics; at 0 none are read.
            views: Function from images to all views that the client trained on, copy after copy;
                an image's features are then the mean of theirs.
        """
        self._features, self._feature_weight = features, feature_weight
        self._statistics = _statistics(observation, knowledge) if batch_norm else {}
        self._batch_norm = batch_norm
        model = rebuild(observation)
        self._inputs: dict[str, Tensor] = {}
        for name in self._statistics:
            model.get_submodule(name).register_forward_pre_hook(self._watch(name))
        parameters = {n: t.detach() for n, t in observation.parameters.items()}
        # A model in train mode writes its statistics into its buffers.
        buffers = {n: t.clone() for n, t in observation.buffers.items()}
        forward = features_function(model, buffers, observation.training)
        self._forward: Callable[[Tensor], Tensor] = lambda images: forward(parameters, images)
        self._views = views

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes value (0-d) and slope (N, C, H, W) at normalized `images`."""
        if self._features is None and not self._statistics:
            return images.new_zeros(()), torch.zeros_like(images)
        with torch.enable_grad():
            variable = images.detach().clone().requires_grad_()
            if self._views is None:
                features = self._forward(variable)
            else:
                features = self._forward(self._views(variable))
                features = features.view(-1, len(images), features.shape[1]).mean(0)
            value = variable.new_zeros(())
            if self._features is not None:
                value = value + self._feature_weight * self._features.misfit(features)
            for name, (mean, variance) in self._statistics.items():
                layer_input = self._inputs[name]
                # Yin et al., equation 9: distances of mean and variance of each layer's input.
                gap = torch.linalg.vector_norm(layer_input.mean((0, 2, 3)) - mean)
                gap = gap + torch.linalg.vector_norm(
                    layer_input.var((0, 2, 3), unbiased=False) - variance
                )
                value = value + self._batch_norm * gap
        (slope,) = torch.autograd.grad(value, variable)
        return value.detach(), slope

    def _watch(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._inputs[name] = inputs[0]

        return hook


def _statistics(observation: Observation, knowledge: Knowledge) -> dict[str, tuple[Tensor, Tensor]]:
    """Reads the mean and variance of each batch-norm layer's input, as `knowledge` grants them."""
    layers = {
        n: m for n, m in rebuild(observation).named_modules() if isinstance(m, nn.BatchNorm2d)
    }
    if knowledge.grant.bn == "exact" and knowledge.exact_bn is not None:
        exact = knowledge.exact_bn
        return {name: (exact[f"{name}.mean"], exact[f"{name}.var"]) for name in layers}
    statistics = {}
    for name, layer in layers.items():
        keys = f"{name}.running_mean", f"{name}.running_var"
        before = [observation.buffers[key] for key in keys if key in observation.buffers]
        after = [
            observation.buffers_update[key] for key in keys if key in observation.buffers_update
        ]
        if knowledge.grant.bn == "inferred" and len(after) == 2 and layer.momentum:
            # new = (1 - m) old + m batch, its variance unbiased: of many positions, nearly the same
            m = layer.momentum
            mean, variance = ((b - (1 - m) * a) / m for a, b in zip(before, after, strict=True))
            statistics[name] = mean, variance.clamp_min(0)
        elif knowledge.grant.bn in ("running", "inferred") and len(before) == 2:
            statistics[name] = before[0], before[1]
    return statistics
