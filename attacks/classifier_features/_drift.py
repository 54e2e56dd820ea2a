"""How features drift while a client's steps move the body, as images of noise show it."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from fedsim.models.local import features_of
from fedsim.models.victim import rebuild
from fedsim.types import Observation
from fedsim_attacks.classifier_features._path import as_one_gradient

_IMAGES = 256
"""Images of noise whose features are watched as they drift."""
_BRIGHTNESS = 0.5
"""Standard deviation of their means, in units of that of their pixels."""
_TRIED = 128
"""Others on which it is tried how well their drift is told."""
_PARTS = slice(_IMAGES), slice(_IMAGES, None)
_RIDGE = 1e-2
"""Of the regression of the drift, over the mean square of a feature."""


def natural_noise(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Draws images of a natural spectrum (N, C, H, W), whose amplitudes fall as 1/f."""
    spectrum = torch.fft.rfft2(torch.randn(shape, generator=rng))
    frequency = torch.hypot(
        torch.fft.fftfreq(shape[-2])[:, None], torch.fft.rfftfreq(shape[-1])[None]
    )
    frequency[0, 0] = 1.0
    images = torch.fft.irfft2(spectrum / frequency, s=tuple(shape[-2:]))
    images = images - images.mean((1, 2, 3), keepdim=True)
    images = images / images.std((1, 2, 3), keepdim=True)
    brightness = _BRIGHTNESS * torch.randn(shape[0], 1, 1, 1, generator=rng)
    return torch.add(images, brightness)


@final
class Drift:
    """How features move along the path: quadratic in the share, linear in the features."""

    def __init__(self, observation: Observation, middle: float, rng: torch.Generator) -> None:
        """Watches features of noise at both ends of the path and at its `middle`."""
        shape = torch.Size((_IMAGES + _TRIED, *observation.model.input_shape))
        images = natural_noise(shape, rng).to(next(iter(observation.parameters.values())).device)
        whole = [_features(observation, share, images) for share in (0.0, 1.0)]
        ends, others = ([each[part] for each in whole] for part in _PARTS)
        self.features, tried = (_features(observation, middle, images)[part] for part in _PARTS)
        """(P, d), of the noise, at the middle."""
        self._middle = middle
        mean_square = self.features.square().sum(1).mean()
        self._unit = mean_square.clamp_min(torch.finfo(mean_square.dtype).tiny).sqrt()
        inputs = self._with_unit(self.features)
        normal = inputs.T @ inputs / len(inputs)
        ridge = _RIDGE * self._unit**2 / inputs.shape[1]
        normal = normal + ridge * torch.eye(len(normal)).to(normal)
        start, end = (
            torch.linalg.solve(normal, inputs.T @ (each - self.features) / len(inputs))
            for each in ends
        )
        # Of a (s - m) + b (s - m)², both ends tell a and b.
        self._curved = end / (1 - middle) + start / middle
        self._straight = self._curved * middle - start / middle
        missed = [self(tried, share) - end for share, end in zip((0.0, 1.0), others, strict=True)]
        spread = (tried - tried.mean(0)).norm()
        self.unexplained = float(torch.stack(missed).norm(dim=(1, 2)).max() / spread)
        """Error of the drift of other noise, over how far features are apart."""

    def __call__(self, features: Tensor, share: float) -> Tensor:
        """Moves `features` (N, d) from the middle to where a `share` of the update is made."""
        away = share - self._middle
        moved: Tensor = self._with_unit(features) @ (away * (self._straight + away * self._curved))
        return features + moved

    def _with_unit(self, features: Tensor) -> Tensor:
        return torch.cat([features, self._unit.expand(len(features), 1)], 1)


def _features(observation: Observation, share: float, images: Tensor) -> Tensor:
    moved = as_one_gradient(observation, share)
    model, training = rebuild(moved), moved.training
    return features_of(model, moved.parameters, moved.buffers, images, training).double()
