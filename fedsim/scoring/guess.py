"""Makes the zero-information guess: N images, made of public ones, at a batch that nobody saw."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.contracts.metric import ScoringError, assign
from fedsim.scoring.image import PSNR_CAP
from fedsim.types import Reconstruction

_POOL, _POOL_VALUES = 10_000, 1 << 26
"""Maximum number of public images, and of their pixels, that are kept: 64 MiB a worker."""
_NEEDED = 20
"""Least number of public images for each image of a good guess. The guess from fewer falls behind
that of many: on digits by 0.2 to 0.4 dB with 20, 0.3 to 0.8 with 10, 0.9 and more with 5."""
_OUTLINE, _ALIKE = 16, 0.99
"""Side in pixels at which near copies are compared, and their least cosine. No bundled face or
photograph of one split has 0.98 with one of the other. Digits reach 0.991. Copies with noise of
0.02 mostly exceed 0.995."""
_SAME_ROW = 1e-6
"""Distance below which two rows count as the same."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Holds the zero-information guess of one batch of N images, or of N rows of a table."""

    name: str
    """Name of the guess: `mean_image`, `mean_by_brightness`, `learned_means`, `class_means`,
    `learned_class_means`; `mean_row` for a table."""
    images: Tensor
    """(N, C, H, W) pixels in [0, 1]; for a table (N, D) rows on [0, 1]."""
    labels: Tensor
    """(N,) int64: the labels that were given, else the likeliest N. Ascending, but for given ones
    of rows."""
    public: int
    """Number of public images, or rows, that the guess was learned from."""
    public_per_image: float
    """Number of public images for each image of the guess; with given labels, of the scarcest."""

    def answer(self) -> Reconstruction:
        """Returns the guess, its images or rows and its labels, as an answer whose loss is NaN."""
        return Reconstruction(images=self.images, labels=self.labels, loss=math.nan, iterations=0)


class _PublicExamples:
    """Holds what guesses are learned from: uint8 images (P, C, H, W), or rows (P, D)."""

    def __init__(self, examples: Tensor, labels: Tensor) -> None:
        self._examples, self._labels = examples, labels

    def public(self, most: int = _POOL) -> Tensor:
        """Returns evenly chosen uint8 images (P, C, H, W), or rows (P, D), at most `most`."""
        # Rounded up, so that no more than `most` come out.
        return self._examples[:: -(-len(self._examples) // most)]

    def public_labels(self, most: int = _POOL) -> Tensor:
        """Returns the labels, (P,) int64, of the examples that `public(most)` returns."""
        return self._labels[:: -(-len(self._labels) // most)]


@final
class Guesser(_PublicExamples):
    """Guesses batches from public images: called with a batch size, it returns a `Guess`.

    Known labels of the batch may follow, as many; else a ScoringError. The same size and labels
    give the same guess, whose tensors are cached: do not change them. Guessers of the same images
    and labels are equal.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Takes P public `images` (P, C, H, W) uint8, `labels` (P,) int64; ScoringError if P is 0.

        At most 10,000 of them, or 64 MiB, are kept; `mean`, (C, H, W) in [0, 1], is that of all.
        """
        self.mean = mean_image(images)
        """(C, H, W) pixels that stand in for each missing image of an attack's answer."""
        # At least two, so that there is a half to try guesses on (`_learn`).
        max_images = min(_POOL, max(2, _POOL_VALUES // images[0].numel()))
        if len(images) > max_images:
            stream = rng.generator(0, "guess", "pool")
            indices = torch.randperm(len(images), generator=stream)[:max_images].sort().values
            images, labels = images[indices], labels[indices]
        super().__init__(images, labels)
        parts = b"".join(t.contiguous().numpy().tobytes() for t in (images, labels, self.mean))
        self._content = repr(images.shape), hashlib.sha256(parts).digest()

    def __eq__(self, other: object) -> bool:
        """Returns whether `other` guesses from the same images, and has the same mean of all."""
        return isinstance(other, Guesser) and other._content == self._content

    def __hash__(self) -> int:
        """Returns a hash."""
        return hash(self._content)

    def count_copies(self, images: Tensor) -> int:
        """Returns how many of `images` have a near copy among the public ones: `near_copies`."""
        return near_copies(images, self.public())

    def __call__(self, count: int, labels: Sequence[int] | None = None) -> Guess:
        """Returns the guess of `count` images; ScoringError if known `labels` are not as many."""
        if labels is not None and len(labels) != count:
            raise ScoringError(f"the guess needs {count} labels, got {len(labels)}")
        # Sorted, so that batches of the same multiset share one cached guess.
        order = None if labels is None else sorted(range(count), key=lambda i: labels[i])
        granted = None if labels is None or order is None else tuple(labels[i] for i in order)
        return _guess(self, count, granted)

    def _learn(self, count: int, granted: tuple[int, ...] | None) -> Guess:
        everything = _PublicPool(self._examples, self._labels, granted, "all")
        stream = rng.generator(0, "guess", "halves")
        order = torch.randperm(len(self._examples), generator=stream)
        half = len(order) // 2
        # One half makes the candidates and the other tries them: none is tried on its own images.
        chosen = "mean_image"
        if half:
            first, second = (
                _PublicPool(self._examples[part], self._labels[part], granted, name)
                for part, name in ((order[:half], "own"), (order[half:], "other"))
            )
            # Of equals the plainer one, which comes first.
            chosen = max(
                first.families(count), key=lambda family: second.psnr(first.guess(family, count))
            )
        # Once the kind is chosen, all images go into it.
        levels = everything.guess(chosen, count)
        labels = _likeliest(self._labels, count) if granted is None else torch.tensor(granted)
        per_image = len(self._labels) / count
        if granted is not None:
            held = self._labels.tolist()
            per_image = min(held.count(label) / granted.count(label) for label in set(granted))
        return Guess(
            name=chosen,
            images=(levels / 255).float().view(count, *self._examples.shape[1:]),
            labels=labels,
            public=len(self._labels),
            public_per_image=per_image,
        )


@final
class RowGuesser(_PublicExamples):
    """Guesses each row by the mean of public ones; called with a count and, maybe, labels."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        """Takes public `rows` (P, D) on [0, 1], `labels` (P,) int64; ScoringError if P is 0."""
        super().__init__(rows, labels)
        self.mean = mean_image(rows)

    def count_copies(self, rows: Tensor) -> int:
        """Returns how many of the `rows` (N, D) equal a public one, to an L2 distance of 1e-6."""
        return int((torch.cdist(rows.double(), self._examples.double()) < _SAME_ROW).any(1).sum())

    def __call__(self, count: int, labels: Sequence[int] | None = None) -> Guess:
        """Returns the guess of `count` rows, whose `labels` are known if given, in their order."""
        return Guess(
            name="mean_row",
            images=self.mean.expand(count, -1).clone(),
            labels=_likeliest(self._labels, count) if labels is None else torch.tensor(labels),
            public=len(self._labels),
            public_per_image=len(self._labels) / count,
        )


@lru_cache(maxsize=64)
def _guess(guesser: Guesser, count: int, granted: tuple[int, ...] | None) -> Guess:
    # Threads only wait for each other in sums as small as these.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return guesser._learn(count, granted)
    finally:
        torch.set_num_threads(before)


def _likeliest(labels: Tensor, count: int) -> Tensor:
    """Returns the multiset of `count` labels with the largest expected overlap, (count,)."""
    from scipy.special import bdtrc

    shares = (labels.bincount().double() / len(labels)).tolist()
    chances = [
        # P(the batch has more than `times` of the label); ties go to the smaller label.
        (float(bdtrc(times, count, share)), -label, -times)
        for label, share in enumerate(shares)
        for times in range(count)
    ]
    best = sorted(chances, reverse=True)[:count]
    return torch.tensor(sorted(-label for _, label, _ in best))


def mean_image(images: Tensor) -> Tensor:
    """Returns the mean, float32 in [0, 1], of (N, ...) uint8 or [0, 1]; ScoringError if N is 0."""
    if not len(images):
        raise ScoringError("the zero-information guess needs a public image")
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    for start in range(0, len(images), _CHUNK):
        # Sums of uint8 are whole numbers, exact in float64, so that chunks change nothing.
        total += images[start : start + _CHUNK].double().sum(0)
    scale = 1.0 if images.is_floating_point() else 255.0
    return (total / (len(images) * scale)).float().clamp(0, 1)


def near_copies(images: Tensor, public: Tensor) -> int:
    """Returns how many of the `images` (N, C, H, W) have a near copy in `public` (P, C, H, W).

    A near copy has a cosine of at least 0.99 at 16 x 16 pixels, without means; brightness and
    contrast do not matter. Copies that are cropped, moved or mirrored are not noticed.
    """
    known = _outlines(public)
    parts = torch.split(images, _CHUNK)
    # Rows have length 1, so that their products are cosines.
    return sum(int(((_outlines(part) @ known.T).amax(1) >= _ALIKE).sum()) for part in parts)


def _outlines(images: Tensor) -> Tensor:
    """Returns (N, D) small images without their means, of length 1; 0 for images of one level."""
    height, width = (min(_OUTLINE, size) for size in images.shape[2:])
    values = F.adaptive_avg_pool2d(images.float(), (height, width)).flatten(1)
    return F.normalize(values - values.mean(1, keepdim=True), dim=1)


def guess_problem(public: int, public_per_image: float, copies: int = 0) -> str | None:
    """Returns a message that says why a guess is poor, and what helps; None if it is good enough.

    It is poor if any attacked images, `copies`, have near copies among the public ones, or if
    `public_per_image` (`Guess`) is below 20. `public` is the number of public images.
    """
    if copies:
        return (
            f"of {copies} attacked image{'s' * (copies != 1)} a public image is a near copy: the "
            "guess, and an attack that is granted public images, may know them without any "
            "update; keep images of one scene, person or source in one split"
        )
    if public_per_image >= _NEEDED:
        return None
    return (
        f"the zero-information guess was learned from {public} public image{'s' * (public != 1)}, "
        f"{public_per_image:.3g} for each image that it answers, where {_NEEDED} are needed: one "
        "can guess better than that, and gains over it look larger than what leaks; use a data "
        "source with more test images, or a smaller batch size"
    )


_CHUNK = 256
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
class _PublicPool:
    """Holds public images that guesses are made of or tried on. Pixels are levels from 0 to 255.

    `images` are (P, C, H, W) uint8, with `labels` (P,). `granted` has the known labels of the batch
    to guess, ascending, `count` of them; None: unknown. Pools of the same `name` draw the same. All
    sums are of whole numbers below 2^53, so that no order of summation changes a guess.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, granted: tuple[int, ...] | None, name: str
    ) -> None:
        self._images, self._labels = images.flatten(1), labels
        self._squares = torch.cat(
            [part.double().square().sum(1) for part in torch.split(self._images, _CHUNK)]
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
