"""Makes the zero-information guess: the answer of someone who saw no update at all.

A batch of N images is guessed by N images, which are matched to the truths as an attack's are. The
guesser has public images with labels, of the test split, which no client holds.
"""

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
from fedsim.contracts.metric import ScoringError
from fedsim.scoring.guess_pool import CHUNK, Pool
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
    """Holds the zero-information guess of one batch."""

    name: str
    """Name of the guess: `mean_image`, `mean_by_brightness`, `learned_means`, `class_means`,
    `learned_class_means`; `mean_row` for a table."""
    images: Tensor
    """(N, C, H, W) pixels in [0, 1]; for a table (N, D) rows on [0, 1]."""
    labels: Tensor
    """(N,) int64: the likeliest multiset, ascending. If labels are known, the granted ones:
    ascending too, but of a table in the order in which they were given."""
    public: int
    """Number of public images, or rows, that the guess was learned from."""
    public_per_image: float
    """Public images for each image of the guess; with granted labels, of the scarcest label."""

    def answer(self, *, labels_alone: bool = False) -> Reconstruction:
        """Returns the guess, or its `labels_alone`, as an attack's answer whose loss is NaN."""
        return Reconstruction(
            images=None if labels_alone else self.images,
            labels=self.labels,
            loss=math.nan,
            iterations=0,
        )


@final
class Guesser:
    """Guesses batches from public images; the same batch size and labels give the same guess.

    Guessers of the same images and labels are equal, so that a process learns a guess once.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Learns from public `images` (P, C, H, W), uint8, with `labels` (P,) int64.

        Raises:
            ScoringError: there is no public image.
        """
        self.mean = mean_image(images)
        """(C, H, W) pixels that stand in for each missing image of an attack's answer.

        A single image for all is no better than the guess that the attack is compared with.
        """
        # At least two, so that there is a half to try guesses on (`_learn`).
        max_images = min(_POOL, max(2, _POOL_VALUES // images[0].numel()))
        if len(images) > max_images:
            stream = rng.generator(0, "guess", "pool")
            indices = torch.randperm(len(images), generator=stream)[:max_images].sort().values
            images, labels = images[indices], labels[indices]
        self._images, self._labels = images, labels
        parts = b"".join(t.contiguous().numpy().tobytes() for t in (images, labels, self.mean))
        self._content = repr(images.shape), hashlib.sha256(parts).digest()

    def __eq__(self, other: object) -> bool:
        """Returns whether `other` guesses from the same images, and has the same mean of all."""
        return isinstance(other, Guesser) and other._content == self._content

    def __hash__(self) -> int:
        """Returns a hash of the images and labels."""
        return hash(self._content)

    def public(self, max_images: int = _POOL) -> Tensor:
        """Returns at most `max_images` public images, evenly chosen, as (P, C, H, W) uint8."""
        # Rounded up, so that no more than `max_images` come out.
        step = -(-len(self._images) // max_images)
        return self._images[::step]

    def public_labels(self, max_images: int = _POOL) -> Tensor:
        """Returns the labels, (P,) int64, of the images that `public(max_images)` returns."""
        return self._labels[:: -(-len(self._images) // max_images)]

    def count_copies(self, images: Tensor) -> int:
        """Returns how many of the `images` (N, C, H, W) have a near copy among the public ones."""
        return near_copies(images, self.public())

    def __call__(self, count: int, labels: Sequence[int] | None = None) -> Guess:
        """Returns the guess of `count` images, whose `labels` are known if given.

        Raises:
            ScoringError: as many labels as images are expected.
        """
        if labels is not None and len(labels) != count:
            raise ScoringError(f"the guess needs {count} labels, got {len(labels)}")
        # Sorted, so that batches of the same multiset share one cached guess.
        order = None if labels is None else sorted(range(count), key=lambda i: labels[i])
        granted = None if labels is None or order is None else tuple(labels[i] for i in order)
        return _guess(self, count, granted)

    def _learn(self, count: int, granted: tuple[int, ...] | None) -> Guess:
        """Learns the guess that `__call__` returns; `granted` labels are ascending."""
        everything = Pool(self._images, self._labels, granted, "all")
        stream = rng.generator(0, "guess", "halves")
        order = torch.randperm(len(self._images), generator=stream)
        half = len(order) // 2
        # One half makes the candidates and the other tries them: none is tried on its own images.
        chosen = "mean_image"
        if half:
            first, second = (
                Pool(self._images[part], self._labels[part], granted, name)
                for part, name in ((order[:half], "own"), (order[half:], "other"))
            )
            # Of equals the plainer one, which comes first.
            chosen = max(
                first.families(count), key=lambda family: second.psnr(first.guess(family, count))
            )
        # Once the kind is chosen, all images go into it.
        levels = everything.guess(chosen, count)
        labels = _likeliest(self._labels, count) if granted is None else torch.tensor(granted)
        return Guess(
            name=chosen,
            images=(levels / 255).float().view(count, *self._images.shape[1:]),
            labels=labels,
            public=len(self._labels),
            public_per_image=self._per_image(count, granted),
        )

    def _per_image(self, count: int, granted: tuple[int, ...] | None) -> float:
        if granted is None:
            return len(self._labels) / count
        return min(
            int((self._labels == label).sum()) / granted.count(label) for label in set(granted)
        )


@final
class RowGuesser:
    """Guesses each row of a table by the mean of public ones."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        """Learns from public `rows` (P, D) on [0, 1], with `labels` (P,) int64.

        Raises:
            ScoringError: there is no public row.
        """
        self.mean = mean_image(rows)
        """(D,) mean entries on [0, 1]."""
        self._rows, self._labels = rows, labels

    def public(self, max_rows: int = _POOL) -> Tensor:
        """Returns at most `max_rows` public rows (by default 10,000), evenly chosen: (P, D)."""
        return self._rows[:: -(-len(self._rows) // max_rows)]

    def public_labels(self, max_rows: int = _POOL) -> Tensor:
        """Returns the labels, (P,) int64, of the rows that `public(max_rows)` returns."""
        return self._labels[:: -(-len(self._rows) // max_rows)]

    def count_copies(self, rows: Tensor) -> int:
        """Returns how many of the `rows` (N, D) equal a public one, to an L2 distance of 1e-6."""
        return int((torch.cdist(rows.double(), self._rows.double()) < _SAME_ROW).any(1).sum())

    def __call__(self, count: int, labels: Sequence[int] | None = None) -> Guess:
        """Returns the guess of `count` rows, whose `labels` are known if given."""
        return Guess(
            name="mean_row",
            images=self.mean.expand(count, -1).clone(),
            labels=_likeliest(self._labels, count) if labels is None else torch.tensor(labels),
            public=len(self._rows),
            public_per_image=len(self._rows) / count,
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
    """Returns the mean image, (C, H, W) float32 pixels in [0, 1].

    `images` are (N, C, H, W) on the CPU, of uint8 levels or of pixels in [0, 1]. Of rows (N, D) on
    [0, 1] the result is the mean row, (D,).

    Raises:
        ScoringError: there is no image.
    """
    if not len(images):
        raise ScoringError("the zero-information guess needs a public image")
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    for start in range(0, len(images), CHUNK):
        # Sums of uint8 are whole numbers, exact in float64, so that chunks change nothing.
        total += images[start : start + CHUNK].double().sum(0)
    scale = 1.0 if images.is_floating_point() else 255.0
    return (total / (len(images) * scale)).float().clamp(0, 1)


def near_copies(images: Tensor, public: Tensor) -> int:
    """Returns how many of the `images` (N, C, H, W) have a near copy in `public` (P, C, H, W).

    Near copies have a cosine of at least 0.99, averaged to 16x16 pixels or fewer and less their
    means. Copies that are cropped, moved or mirrored are not noticed. An image of one level has no
    copy.
    """
    known = _outlines(public)
    parts = torch.split(images, CHUNK)
    # Rows have length 1, so that their products are cosines.
    return sum(int(((_outlines(part) @ known.T).amax(1) >= _ALIKE).sum()) for part in parts)


def _outlines(images: Tensor) -> Tensor:
    """Returns small images without their means, (N, D) of length 1; 0 for images of one level."""
    height, width = (min(_OUTLINE, size) for size in images.shape[2:])
    values = F.adaptive_avg_pool2d(images.float(), (height, width)).flatten(1)
    return F.normalize(values - values.mean(1, keepdim=True), dim=1)


def guess_problem(public: int, public_per_image: float, copies: int = 0) -> str | None:
    """Returns why a guess is poor, in words; None if it is good.

    It is good from 20 public images for each guessed one (`public_per_image`) on, without `copies`:
    attacked images with near copies among the public ones.
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
