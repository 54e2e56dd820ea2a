"""Learns zero-information guesses from a pool of public images, and tries them on another.

Which N images are matched best is learned on batches drawn from the public images. Starting from
the means of N classes of brightness, each batch is matched to the N images, and each of these
becomes a mean of what it was matched to, weighted by 1 / MSE. That step increases the mean PSNR at
fixed matches, since the logarithm is concave (majorization: Hunter and Lange, The American
Statistician 58, 2004). Images so learned compete with the mean image, with the mean image at
several levels of brightness and with means by class. What counts is the mean PSNR on public images
that they were not made of. No choice looks at the truth.

All sums are of whole numbers below 2^53, so that no order of summation changes a guess.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.metric import assign
from fedsim.scoring.image import PSNR_CAP

CHUNK = 256
"""Number of images that are summed at once, which bounds the memory of float64 copies."""

_MIN_MSE = 10 ** (-PSNR_CAP / 10)
"""Least mean squared error that is counted, the error at `PSNR_CAP`."""

_STEPS = 20
"""Number of learning steps: as good as 60 on CIFAR-10, for batches of 1 to 16."""

_SUMMED_STEPS = 10
"""Number of last steps that sums run over, so that more images make a mean."""

_IMAGES_PER_STEP = 1000
"""Number of public images in the batches of one step, about."""

_VALUES_PER_STEP = 1 << 24
"""Maximum number of values in the batches of one step: 128 MiB."""

_MAX_LEARNED = 512
"""Maximum batch size for which guesses are learned, since matching costs its cube."""

_WEIGHT = 1 << 28
"""Weight of the best matched image: 131,000 images of level 255 at that weight sum up to 2^53."""


@final
class Pool:
    """Holds public images that guesses are made of or tried on. Pixels are levels from 0 to 255.

    `images` are (P, C, H, W) uint8, with `labels` (P,). `granted` has the known labels of the batch
    to guess, ascending, `count` of them; None: unknown. Pools of the same `name` draw the same.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, granted: tuple[int, ...] | None, name: str
    ) -> None:
        self._images, self._labels = images.flatten(1), labels
        self._squares = torch.cat(
            [part.double().square().sum(1) for part in torch.split(self._images, CHUNK)]
        )
        self._granted, self._name = granted, name

    def families(self, count: int) -> list[str]:
        """Returns names of the guesses that can be made for `count` images, the plainest first."""
        plain, learned = ["mean_image", "mean_by_brightness"], "learned_means"
        if self._granted is not None:
            plain, learned = [*plain, "class_means"], "learned_class_means"
        return [*plain, learned] if count <= _MAX_LEARNED else plain

    def guess(self, family: str, count: int) -> Tensor:
        """Returns the guess of a family in `families`, as (count, C * H * W) float64 levels."""
        if family == "mean_image":
            return _means(self._images, 1).expand(count, -1)
        if family == "mean_by_brightness":
            # Pixels of the mean of all images are surer than those of each class of brightness.
            levels = _means(self._images, count).mean(1, keepdim=True).round()
            mean = _means(self._images, 1)
            return (mean + levels - mean.mean().round()).clamp(0, 255)
        if family == "class_means":
            return self._class_means()
        start = self._class_means() if "class" in family else _means(self._images, count)
        return self._learn(start) if "learned" in family else start

    def psnr(self, levels: Tensor) -> float:
        """Returns the mean PSNR, dB, of a guess by `guess` on batches drawn from this pool."""
        drawn = self._draw(len(levels), rng.generator(0, "guess", self._name, "tried"))
        errors, _ = self._match(levels, drawn, self._images[drawn].double())
        scale = 255.0**2 * levels.shape[1]
        # The mean of rounded logarithms: a tie of two guesses is not decided by the order of sums.
        return round(float((-10 * (errors / scale).log10()).mean()), 6)

    def _class_means(self) -> Tensor:
        """Returns means by class and, where a class occurs several times, by brightness."""
        assert self._granted is not None
        parts = []
        for label in sorted(set(self._granted)):
            images = self._images[self._indices(label)]
            parts.append(_means(images, self._granted.count(label)))
        return torch.cat(parts)

    def _indices(self, label: int) -> Tensor:
        """Returns the indices of that label, or of all images if it has none here."""
        # Half of a small pool may lack a class that the whole pool has.
        indices = (self._labels == label).nonzero().flatten()
        return indices if len(indices) else torch.arange(len(self._labels))

    def _learn(self, levels: Tensor) -> Tensor:
        """Improves the guess `levels` by `_STEPS` steps."""
        stream = rng.generator(0, "guess", self._name, "learned")
        min_error = math.ceil(_MIN_MSE * 255**2 * levels.shape[1])
        sums, totals = torch.zeros_like(levels), levels.new_zeros(len(levels), 1)
        for step in range(_STEPS):
            drawn = self._draw(len(levels), stream)
            pixels = self._images[drawn].double()
            errors, matches = self._match(levels, drawn, pixels)
            by_guess = torch.zeros(len(levels), len(drawn), dtype=torch.float64)
            # Weights are rounded up to whole numbers: sums stay exact, and no weight is 0.
            by_guess[matches, torch.arange(len(drawn))] = (_WEIGHT * min_error / errors).ceil()
            # The sums of early steps are of poorer matches, and are dropped.
            if step <= _STEPS - _SUMMED_STEPS:
                sums, totals = torch.zeros_like(sums), torch.zeros_like(totals)
            sums += by_guess @ pixels
            totals += by_guess.sum(1, keepdim=True)
            levels = (sums / totals).round()
        return levels

    def _match(self, levels: Tensor, drawn: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Matches batches to the guess; returns squared errors (M,) and matches (M,)."""
        count = len(levels)
        # |a - b|² = |a|² - 2ab + |b|², without loss, as all of it are whole numbers below 2^53.
        squares = self._squares[drawn][:, None] + levels.square().sum(1)
        errors = (squares - pixels @ (2 * levels.T)).view(-1, count, count)
        if count == 1:
            matches = torch.zeros(len(errors), 1, dtype=torch.int64)
        else:
            matches = torch.tensor([assign(batch_errors) for batch_errors in errors])
        min_error = math.ceil(_MIN_MSE * 255**2 * levels.shape[1])
        matched = errors.gather(2, matches[..., None]).flatten().clamp_min(min_error)
        return matched, matches.flatten()

    def _draw(self, count: int, stream: torch.Generator) -> Tensor:
        """Draws indices (M,) of images in batches of `count`, with the granted labels if any."""
        batches = max(1, min(_IMAGES_PER_STEP, _VALUES_PER_STEP // self._images.shape[1]) // count)
        if self._granted is None:
            return _repeat(torch.arange(len(self._labels)), batches * count, stream)
        drawn = torch.empty(batches, count, dtype=torch.int64)
        for label in sorted(set(self._granted)):
            places = [i for i, value in enumerate(self._granted) if value == label]
            indices = _repeat(self._indices(label), batches * len(places), stream)
            drawn[:, places] = indices.view(batches, len(places))
        return drawn.flatten()


def _repeat(indices: Tensor, count: int, stream: torch.Generator) -> Tensor:
    """Returns `count` of `indices` in random order, each once before any occurs again."""
    turns = -(-count // len(indices))
    parts = [indices[torch.randperm(len(indices), generator=stream)] for _ in range(turns)]
    return torch.cat(parts)[:count]


def _means(images: Tensor, count: int) -> Tensor:
    """Returns (count, D) levels: means of equal classes of brightness of `images` (P, D)."""
    order = images.sum(1, dtype=torch.int64).argsort(stable=True)
    means = []
    for place in range(count):
        start = place * len(order) // count
        # With fewer images than classes, some serve in several of them.
        end = max(start + 1, (place + 1) * len(order) // count)
        total = images[order[start:end]].sum(0, dtype=torch.int64)
        means.append((total.double() / (end - start)).round())
    return torch.stack(means)
