"""Makes the zero-information guess: the answer of someone who saw no update at all.

A batch of N images is guessed by N images, which are matched to the truths as an attack's are. The
guesser has public images with labels, of the test split, which no client holds. It also knows what
the threat model grants of the batch: how many images it holds, and their labels if these are known.

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from fedsim import rng
from fedsim.scoring.image import PSNR_CAP
from fedsim.scoring.matching import assign
from fedsim.scoring.outcome import ScoringError
from fedsim.types import Reconstruction

_CHUNK = 256
_MIN_MSE = 10 ** (-PSNR_CAP / 10)
"""A mean squared error counts as at least this, the error at `PSNR_CAP`."""
_STEPS = 20
"""Number of learning steps: as good as 60 on CIFAR-10, for batches of 1 to 16."""
_SUMMED_STEPS = 10
"""Sums run over this many of the last steps, so that more images make a mean."""
_IMAGES_PER_STEP = 1000
"""About so many public images are in the batches of one step."""
_VALUES_PER_STEP = 1 << 24
"""The batches of one step hold at most so many values: 128 MiB."""
_MAX_LEARNED = 512
"""Guesses are learned for batches of at most so many images; matching costs the cube of that."""
_POOL, _POOL_VALUES = 10_000, 1 << 26
"""At most so many public images, and pixels of them, are kept: 64 MiB in every worker."""
_NEEDED = 20
"""A guess is good from so many public images for each of its own. With fewer it falls behind that
of many: on digits by 0.2 to 0.4 dB with 20, by 0.3 to 0.8 with 10, by 0.9 and more with 5."""
_WEIGHT = 1 << 28
"""Weight of the best matched image: 131,000 images of level 255 at that weight sum up to 2^53."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """The zero-information guess of one batch."""

    name: str
    """`mean_image`, `mean_by_brightness`, `learned_means`, `class_means`, `learned_class_means`."""
    images: Tensor
    """(N, C, H, W) pixels in [0, 1]."""
    labels: Tensor
    """(N,) int64: labels of the images; the granted ones, if labels are known."""
    labels_alone: Tensor
    """(N,) int64: the guess for attacks that answer labels without images."""
    public: int
    """Number of public images that the guess was learned from."""
    public_per_image: float
    """Public images for each image of the guess; with granted labels, of the label with fewest."""

    def answer(self, *, labels_alone: bool = False) -> Reconstruction:
        """Returns the guess as an attack would hand it in; it has no objective."""
        return Reconstruction(
            images=None if labels_alone else self.images,
            labels=self.labels_alone if labels_alone else self.labels,
            loss=math.nan,
            iterations=0,
        )


@final
class Guesser:
    """Guesses batches from public images; the same batch size and labels give the same guess."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Learns from public `images` (P, C, H, W), uint8, with `labels` (P,) int64.

        Raises:
            ScoringError: there is none.
        """
        self.mean = mean_image(images)
        """(C, H, W) pixels: what a truth counts as that an attack left without an image. A single
        image for all of them, which is no better than the guess that the attack is compared with.
        """
        max_images = min(_POOL, max(2, _POOL_VALUES // images[0].numel()))
        if len(images) > max_images:
            stream = rng.generator(0, "guess", "pool")
            indices = torch.randperm(len(images), generator=stream)[:max_images].sort().values
            images, labels = images[indices], labels[indices]
        self._images, self._labels = images, labels

    def public(self, max_images: int) -> Tensor:
        """Returns at most so many public images, evenly chosen: (P, C, H, W), uint8."""
        step = -(-len(self._images) // max_images)
        return self._images[::step]

    def __call__(self, count: int, labels: Sequence[int] | None = None) -> Guess:
        """Returns the guess of `count` images, whose `labels` are known if given.

        Raises:
            ScoringError: as many labels as images are expected.
        """
        if labels is not None and len(labels) != count:
            raise ScoringError(f"the guess needs {count} labels, got {len(labels)}")
        order = None if labels is None else sorted(range(count), key=lambda i: labels[i])
        granted = None if labels is None or order is None else tuple(labels[i] for i in order)
        return _guess(self, count, granted)

    def _learn(self, count: int, granted: tuple[int, ...] | None) -> Guess:
        """See `__call__`; `granted` labels are ascending."""
        everything = _Pool(self._images, self._labels, granted, "all")
        stream = rng.generator(0, "guess", "halves")
        order = torch.randperm(len(self._images), generator=stream)
        half = len(order) // 2
        chosen = "mean_image"
        if half:
            first, second = (
                _Pool(self._images[part], self._labels[part], granted, name)
                for part, name in ((order[:half], "own"), (order[half:], "other"))
            )
            # Of equals the plainer one, which comes first.
            chosen = max(
                first.families(count),
                key=lambda family: second.psnr(first.guess(family, count)),
            )
        levels = everything.guess(chosen, count)
        predicted = everything.labels_of(levels)
        alone = _likeliest(self._labels, count) if granted is None else torch.tensor(granted)
        return Guess(
            name=chosen,
            images=(levels / 255).float().view(count, *self._images.shape[1:]),
            labels=predicted,
            labels_alone=alone,
            public=len(self._labels),
            public_per_image=self._per_image(count, granted),
        )

    def _per_image(self, count: int, granted: tuple[int, ...] | None) -> float:
        if granted is None:
            return len(self._labels) / count
        return min(
            int((self._labels == label).sum()) / granted.count(label) for label in set(granted)
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


@final
class _Pool:
    """Holds public images that guesses are made of or tried on. Pixels are levels from 0 to 255."""

    def __init__(
        self, images: Tensor, labels: Tensor, granted: tuple[int, ...] | None, name: str
    ) -> None:
        self._images, self._labels = images.flatten(1), labels
        self._squares = torch.cat(
            [part.double().square().sum(1) for part in torch.split(self._images, _CHUNK)]
        )
        self._granted, self._name = granted, name

    def families(self, count: int) -> list[str]:
        """Names the guesses that can be made of `count` images, the plainest first."""
        plain, learned = ["mean_image", "mean_by_brightness"], "learned_means"
        if self._granted is not None:
            plain, learned = [*plain, "class_means"], "learned_class_means"
        return [*plain, learned] if count <= _MAX_LEARNED else plain

    def guess(self, family: str, count: int) -> Tensor:
        """Returns the guess of that name: (N, D) levels, float64."""
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
        return self._learned(start) if "learned" in family else start

    def psnr(self, levels: Tensor) -> float:
        """Returns the mean PSNR of the guess `levels` on batches of this pool, dB."""
        drawn = self._drawn(len(levels), rng.generator(0, "guess", self._name, "tried"))
        errors, _ = self._matched(levels, drawn, self._images[drawn].double())
        scale = 255.0**2 * levels.shape[1]
        # The mean of rounded logarithms: a tie of two guesses is not decided by the order of sums.
        return round(float((-10 * (errors / scale).log10()).mean()), 6)

    def labels_of(self, levels: Tensor) -> Tensor:
        """Returns the label of each image of the guess, (N,): the granted or likeliest one."""
        drawn = self._drawn(len(levels), rng.generator(0, "guess", self._name, "labels"))
        _, matches = self._matched(levels, drawn, self._images[drawn].double())
        classes = int(self._labels.max()) + 1
        votes = torch.zeros(len(levels), classes, dtype=torch.int64)
        ones = torch.ones(len(drawn), dtype=torch.int64)
        votes.index_put_((matches, self._labels[drawn]), ones, accumulate=True)
        if self._granted is None:
            return votes.argmax(1)
        slots = torch.tensor(self._granted)
        columns = slots.clamp(max=classes - 1)
        counts = votes[:, columns] * (slots < classes)
        places = assign(-counts.double())
        return slots[places]

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
        indices = (self._labels == label).nonzero().flatten()
        return indices if len(indices) else torch.arange(len(self._labels))

    def _learned(self, levels: Tensor) -> Tensor:
        """Improves the guess `levels` by `_STEPS` steps."""
        stream = rng.generator(0, "guess", self._name, "learned")
        min_error = math.ceil(_MIN_MSE * 255**2 * levels.shape[1])
        sums, totals = torch.zeros_like(levels), levels.new_zeros(len(levels), 1)
        for step in range(_STEPS):
            drawn = self._drawn(len(levels), stream)
            pixels = self._images[drawn].double()
            errors, matches = self._matched(levels, drawn, pixels)
            by_guess = torch.zeros(len(levels), len(drawn), dtype=torch.float64)
            by_guess[matches, torch.arange(len(drawn))] = (_WEIGHT * min_error / errors).ceil()
            if step <= _STEPS - _SUMMED_STEPS:
                sums, totals = torch.zeros_like(sums), torch.zeros_like(totals)
            sums += by_guess @ pixels
            totals += by_guess.sum(1, keepdim=True)
            levels = (sums / totals).round()
        return levels

    def _matched(self, levels: Tensor, drawn: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Matches batches to the guess; returns squared errors (M,) and matches (M,)."""
        count = len(levels)
        squares = self._squares[drawn][:, None] + levels.square().sum(1)
        errors = (squares - 2 * pixels @ levels.T).view(-1, count, count)
        if count == 1:
            matches = torch.zeros(len(errors), 1, dtype=torch.int64)
        else:
            matches = torch.tensor([assign(batch_errors) for batch_errors in errors])
        min_error = math.ceil(_MIN_MSE * 255**2 * levels.shape[1])
        matched = errors.gather(2, matches[..., None]).flatten().clamp_min(min_error)
        return matched, matches.flatten()

    def _drawn(self, count: int, stream: torch.Generator) -> Tensor:
        """Draws indices (M,) of images in batches of `count`, with the granted labels if any."""
        batches = max(1, min(_IMAGES_PER_STEP, _VALUES_PER_STEP // self._images.shape[1]) // count)
        if self._granted is None:
            return _repeated(torch.arange(len(self._labels)), batches * count, stream)
        drawn = torch.empty(batches, count, dtype=torch.int64)
        for label in sorted(set(self._granted)):
            places = [i for i, value in enumerate(self._granted) if value == label]
            indices = _repeated(self._indices(label), batches * len(places), stream)
            drawn[:, places] = indices.view(batches, len(places))
        return drawn.flatten()


def _repeated(indices: Tensor, count: int, stream: torch.Generator) -> Tensor:
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
        end = max(start + 1, (place + 1) * len(order) // count)
        total = images[order[start:end]].sum(0, dtype=torch.int64)
        means.append((total.double() / (end - start)).round())
    return torch.stack(means)


def _likeliest(labels: Tensor, count: int) -> Tensor:
    """Returns the multiset of `count` labels with the largest expected overlap, (count,).

    One more of a label hits if it occurs at least so often: the likeliest is added, time and again.
    """
    from scipy.stats import binom

    shares = (labels.bincount().double() / len(labels)).tolist()
    chances = [
        (float(binom.sf(times, count, share)), -label, -times)
        for label, share in enumerate(shares)
        for times in range(count)
    ]
    best = sorted(chances, reverse=True)[:count]
    return torch.tensor(sorted(-label for _, label, _ in best))


def mean_image(images: Tensor) -> Tensor:
    """Returns the mean of (N, C, H, W) images, uint8 or pixels: float32 pixels in [0, 1].

    Raises:
        ScoringError: there is no image.
    """
    if not len(images):
        raise ScoringError("the zero-information guess needs a public image")
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    for start in range(0, len(images), _CHUNK):
        total += images[start : start + _CHUNK].double().sum(0)
    scale = 1.0 if images.is_floating_point() else 255.0
    return (total / (len(images) * scale)).float().clamp(0, 1)


def guess_problem(public: int, public_per_image: float) -> str | None:
    """Returns why a guess from so many images (see `Guess`) is poor; None if it is not."""
    if public_per_image >= _NEEDED:
        return None
    return (
        f"the zero-information guess was learned from {public} public image{'s' * (public != 1)}, "
        f"{public_per_image:.3g} for each image that it answers, where {_NEEDED} are needed: one "
        "can guess better than that, and gains over it look larger than what leaks; use a data "
        "source with more test images, or a smaller batch size"
    )
