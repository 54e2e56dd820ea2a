"""Scores images: pixels of the batch that an update was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.contracts.metric import (
    MISSING,
    MOST_CANDIDATES,
    GuessChances,
    Metric,
    ScoredPair,
    ScoringError,
    Term,
    Unavailable,
    align,
    bound_chances,
    match,
    ordered,
)
from fedsim.contracts.target import Aids, GuessRequest, Resources, Target, TargetGuess, TargetScores
from fedsim.scoring import image
from fedsim.scoring.guess import Guess, Guesser, RowGuesser
from fedsim.scoring.image import LpipsMetric, haarpsi, load_lpips
from fedsim.types import Payload, Reconstruction, Truth, as_pixels

EXPOSED_IMAGE = 15.0
"""Gain in dB from which a single image is a leak, however many of its batch stay hidden. It is over
the image's own guess, and over the same attack's answer to another update. It is more than
`Images.exposes`, since the best of many images is chosen."""
LIKENESS_GAIN = 0.2
"""Gain in structure (SSIM) or perceived likeness (LPIPS) from which an image leaks, over the guess
and another update. Pixels do not matter then, as pictures of other colors have a low PSNR."""
RECOGNIZABLE_LPIPS = 0.3
"""Mean LPIPS up to which images that leak by their perceptual distance are recognizable."""
RECOGNIZABLE_SSIM = 0.5
"""Mean SSIM from which the images of a leak are recognizable."""
RECOGNIZABLE_HAARPSI = 0.5
"""Mean HaarPSI that pictures need besides their SSIM to count as recognizable. Of answers with an
SSIM of 0.5 or more, at 32 x 32 pixels, the truth was by edges the nearest of 2,066 pictures in 218
of 251 cases with this HaarPSI, and in 16 of 29 below (66 truths; benchmarks/likeness.py)."""
RECOGNIZABLE_PSNR = 20.0
"""Mean PSNR in dB from which images of a leak are recognizable, if SSIM was not measured."""
_IMAGE_AXES = 4
_MOST_PIXELS = 1 << 24
"""Maximum number of values that are compared for the chance of a guess."""


@dataclass(frozen=True, kw_only=True)
class ImageAid:
    """Holds what scores of images need besides the answer and the truth."""

    guesser: Guesser | RowGuesser | None = None
    """Guesser of images, or of a table's rows, from public ones; None where there are none."""
    fill: Tensor | None = None
    """(C, H, W) pixels in [0, 1] that stand in for a missing image; None if none do."""
    lpips: LpipsMetric | Unavailable | None = None
    """Perceptual metric, or why there is none; None if it was not asked for."""


PSNR = Metric(
    name="psnr",
    compute=ordered(image.psnr),
    unit="dB",
    larger_leaks=True,
    heading="PSNR dB",
    meaning="likeness of pixels, or of entries on their declared range",
    described=Term(
        key="psnr",
        name="PSNR",
        meaning="Likeness of pixels in dB, of each image on its own, at most 60. Higher is more "
        "leaked. Near 10 it is a gray patch; from about 20 on most people know the picture.",
    ),
    shown_as="interval",
    digits=1,
    narrow="kept",
)

RMSE = Metric(name="rmse", compute=ordered(image.rmse), unit="range", larger_leaks=False)


def _perceive(pair: ScoredPair) -> Tensor | Unavailable:
    """Returns LPIPS, (N,) float64, of a pair of images whose aid has it, or the reason for none."""
    claimed, truth = pair.claimed, pair.truth
    lpips: LpipsMetric | Unavailable | None = pair.aid and pair.aid.lpips
    if lpips is None:
        return Unavailable("LPIPS was not asked for")
    if isinstance(lpips, Unavailable):
        return lpips
    if truth.shape[1] not in (1, 3):
        return Unavailable(f"LPIPS needs 1 or 3 channels, these images have {truth.shape[1]}")
    return lpips(claimed, truth)


class Images(Target):
    """Scores a batch's images, in any order."""

    part: ClassVar[str] = "images"
    """Name of answers (M, C, H, W), pixels in [0, 1], and of the truth (N, C, H, W)."""
    noun: ClassVar[str] = "images"
    singular: ClassVar[str] = "image"
    order: ClassVar[float] = 0.0
    payloads: ClassVar[tuple[Payload, ...]] = ("update",)
    itemwise: ClassVar[bool] = True
    pictured: ClassVar[bool] = True
    saved_as: ClassVar[tuple[str, str] | None] = ("reconstruction", "truth")
    keeps_truth: ClassVar[bool] = True
    leaks: ClassVar[float] = 3.0
    exposes: ClassVar[float | None] = 10.0
    likeness: ClassVar[Mapping[str, float]] = {
        "ssim": RECOGNIZABLE_SSIM,
        "lpips": RECOGNIZABLE_LPIPS,
    }
    likeness_gain: ClassVar[float] = LIKENESS_GAIN
    agreement: ClassVar[Mapping[str, float]] = {"haarpsi": RECOGNIZABLE_HAARPSI}
    recognizable_from: ClassVar[float | None] = RECOGNIZABLE_PSNR
    metrics: ClassVar[tuple[Metric, ...]] = (
        PSNR,
        RMSE,
        Metric(
            name="ssim",
            compute=ordered(image.ssim),
            unit="none",
            larger_leaks=True,
            heading="SSIM",
            meaning="likeness of structure, 1 is identical",
            described=Term(
                key="ssim",
                name="SSIM",
                meaning="Likeness of structure such as edges. 1 is identical, 0 is unrelated.",
            ),
        ),
        Metric(
            name="haarpsi",
            compute=ordered(haarpsi),
            unit="none",
            larger_leaks=True,
            heading="HaarPSI",
            meaning="perceptual likeness of edges and colors, 1 is identical",
            described=Term(
                key="haarpsi",
                name="HaarPSI",
                meaning="Likeness of edges and colors as people judge photographs. 1 is identical; "
                "unrelated pictures have about 0.2 to 0.4. It needs no weights, and confirms what "
                "PSNR and SSIM say: noise on a plain picture has a high value as well.",
            ),
        ),
        Metric(
            name="lpips",
            compute=_perceive,
            unit="none",
            larger_leaks=False,
            heading="LPIPS",
            meaning="perceptual distance, 0 is identical",
            described=Term(
                key="lpips",
                name="LPIPS",
                meaning="Distance of two images as a trained network perceives it. 0 is "
                "identical. It needs weights that may not be there.",
            ),
        ),
    )

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the true images (N, C, H, W) in [0, 1]; None if the truth is of rows."""
        inputs = truth.tensors().get("images")
        return inputs if inputs is not None and inputs.ndim == _IMAGE_AXES else None

    def prepare(self, resources: Resources) -> ImageAid:
        """Returns an aid with the guesser of `resources` and LPIPS, which may be `Unavailable`."""
        guesser = resources.guesser
        if guesser is None:
            return ImageAid(lpips=Unavailable("the data are no images"))
        # The mean of a table's rows fills no image.
        if guesser.mean.ndim != _IMAGE_AXES - 1:
            return ImageAid(guesser=guesser, lpips=Unavailable("the data are no images"))
        lpips = load_lpips(resources.lpips_backbone, resources.lpips_weights)
        return ImageAid(guesser=guesser, fill=guesser.mean, lpips=lpips)

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is (M, C, H, W) in [0, 1], C, H, W as true ones."""
        true = self.truth_of(truth)
        if true is None:
            raise ScoringError("images were answered, and the batch is of rows of a table")
        image.check_pixels(true, "truth")
        image.check_pixels(answer, "reconstruction")
        self.check_each(answer, true)

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Scores a checked answer, matched to the truth by least total squared error.

        A true image without a match counts as answered by the aid's `fill` or, without one, is
        left out and counted in `missing`. A KeyError says that no images were recorded.
        """
        aid = aid_of(aids)
        true, answer = truth.tensors()["images"].detach().cpu(), answer.detach().cpu()
        assignment = match(answer, true)
        matched = [place for place, k in enumerate(assignment) if k != MISSING]
        if aid.fill is None:
            claimed, true = answer[[assignment[place] for place in matched]], true[matched]
        else:
            claimed = align(answer, assignment, aid.fill)
        values = self.compute_metrics(ScoredPair(claimed=claimed, truth=true, aid=aid))
        notes = {}
        # Values of LPIPS compare only at one backbone, one set of weights and one size.
        if isinstance(values.get("lpips"), Tensor) and isinstance(aid.lpips, LpipsMetric):
            notes["lpips"] = aid.lpips.describe(*true.shape[-2:])
        # With a `fill`, each truth has pixels to be compared with.
        missing = 0 if aid.fill is not None else len(assignment) - len(matched)
        return TargetScores(values=values, assignment=assignment, missing=missing, notes=notes)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the scored guess; None without public or true images.

        So it is if the attack answered neither images nor features.
        """
        guess = guessed_batch(request, aids)
        unseen = self.truth_of(request.truth) is None
        if guess is None or unseen or answers_labels_alone(request.found):
            return None
        compared = self.compare(guess.images, request.truth, aids)
        return TargetGuess(
            name=guess.name,
            metrics=compared.means(),
            # Rows hold no other metric of the guess image by image.
            per_image={n: v for n, v in compared.per_image().items() if n == PSNR.name},
            learned=described_guess(guess, request, aids),
        )

    def measure_chances(self, request: GuessRequest, aids: Aids) -> Mapping[str, GuessChances]:
        """Returns {`psnr`: chances of public images by level}; empty without these or true ones."""
        guesser, true = aid_of(aids).guesser, self.truth_of(request.truth)
        if not isinstance(guesser, Guesser) or true is None:
            return {}
        found = _measure_pixel_chances(guesser, request.granted.labels == "known")
        return {PSNR.name: replace(found, answers=count_answers(request, self, len(true)))}

    def filling(self, true: Tensor, aids: Aids) -> Tensor:
        """Returns the mean public image (C, H, W); an AssertionError if `aids` have none."""
        fill = aid_of(aids).fill
        assert fill is not None  # only a run, which has public images, saves answers
        return fill


class RankedImages(Images):
    """Serves as base of targets that score answered images by metrics of their own.

    A subclass states `part`, `metrics` and `leaks`. Its first metric ranks attacks, not `Images`.
    """

    order: ClassVar[float] = -1.0
    payloads: ClassVar[tuple[Payload, ...]] = ()
    exposes: ClassVar[float | None] = None

    def answer_of(self, found: Reconstruction) -> Tensor | None:
        """Returns the images of the answer; None if it has none."""
        return found.images


def aid_of(aids: Aids) -> ImageAid:
    """Returns what `Images.prepare` returned, from `aids`; an empty aid if there is none."""
    aid = aids.get(Images.part)
    return aid if isinstance(aid, ImageAid) else ImageAid()


def count_answers(request: GuessRequest, target: Target, batch: int) -> int:
    """Returns how many examples the attack answered to `target`, but at least `batch`."""
    answer = target.answer_of(request.found) if request.found else None
    return max(batch, 0 if answer is None else len(answer))


@cache
def _measure_pixel_chances(guesser: Guesser, labels_known: bool) -> GuessChances:
    """Returns how likely a single image reaches each PSNR of a public image, drawn at random."""
    largest = max(2, min(MOST_CANDIDATES, _MOST_PIXELS // guesser.mean.numel()))
    pixels = as_pixels(guesser.public(largest)).flatten(1).double()
    labels = guesser.public_labels(largest) if labels_known else None
    # The root of a mean square is a distance, of which PSNR is a function.
    distances = torch.cdist(pixels, pixels) / pixels.shape[1] ** 0.5
    levels = tuple(step / 2 for step in range(2 * int(image.PSNR_CAP) + 1))
    chances = bound_chances(distances, [10 ** (-level / 20) for level in levels], labels)
    return GuessChances(levels=levels, chances=chances, candidates=len(pixels))


def answers_labels_alone(found: Reconstruction | None) -> bool:
    """Returns whether an attack answered neither images nor features; False for None (failed)."""
    return found is not None and found.images is None and found.features is None


def guessed_batch(request: GuessRequest, aids: Aids) -> Guess | None:
    """Returns the guess of a batch's images or rows, and labels, from public ones.

    It knows the true labels if they are granted. It is None without public data or true labels.
    """
    guesser, truth = aid_of(aids).guesser, request.truth.tensors()
    if guesser is None or "labels" not in truth:
        return None
    # The guess is granted what the attack is, and no more.
    known = truth["labels"].tolist() if request.granted.labels == "known" else None
    return guesser(len(truth["labels"]), known)


def described_guess(guess: Guess, request: GuessRequest, aids: Aids) -> dict[str, Any]:
    """Returns `TargetGuess.learned` of a `guess` that `guessed_batch` made with the same `aids`."""
    guesser, images = aid_of(aids).guesser, request.truth.tensors()["images"].cpu()
    assert guesser is not None
    return {
        "public": guess.public,
        "public_per_image": guess.public_per_image,
        "near_copies": guesser.count_copies(images),
    }
