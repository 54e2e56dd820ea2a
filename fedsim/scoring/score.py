"""Scores a reconstruction, the guess beside it and its certificates, each target by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.metric import MISSING, GuessChances, ScoringError, Unavailable
from fedsim.contracts.target import METRICS, Aids, GuessRequest, Resources, targets
from fedsim.types import LARGEST, Reconstruction, Tensors, Truth
from fedsim.words import number_of

OWN_LOSS = "attack_loss"
"""Field of a row's metrics for the attack's own objective, which compares no two attacks."""
NO_AIDS: Aids = MappingProxyType({})
"""Aids without public images: nothing is guessed, and no missing image is filled in."""
NOT_LEARNED = {"public": None, "public_per_image": None, "near_copies": None}
"""Fields of a baseline that was not learned from public images."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """States how close a reconstruction came; `scores[metric]` is its mean, or None.

    It is None where the metric does not apply; a name that is no metric's is a KeyError.
    """

    means: Mapping[str, float]
    """Metric -> mean over the batch, in the metric's unit; one that does not apply is missing."""
    per_image: dict[str, list[float]]
    """Metric -> its value for each scored truth, in the truth's order; principal angles ascend."""
    assignments: Mapping[str, list[int]]
    """Matched part, as `images` -> index of the answer scored against each truth; -1 for none."""
    missing: int
    """Number of true images without an answer or a guess, which metrics leave out."""
    notes: dict[str, str]
    """Metric -> why it has no value, or how it was computed where only like values compare."""

    def __getitem__(self, name: str) -> float | None:
        """Returns the mean of the metric `name`."""
        return self.metrics()[name]

    @property
    def assignment(self) -> list[int]:
        """The first of `assignments`, that of images if they were matched; empty if none was."""
        return next(iter(self.assignments.values()), [])

    def metrics(self) -> dict[str, float | None]:
        """Returns every metric's name with its mean; None where it does not apply."""
        return {name: self.means.get(name) for name in (*METRICS, OWN_LOSS)}


def no_metrics() -> dict[str, float | None]:
    """Returns every metric's name with None, as `Scores.metrics` of what was not scored."""
    return dict.fromkeys((*METRICS, OWN_LOSS))


def prepare(resources: Resources) -> Aids:
    """Computes what each target needs for scores, once a run: part of a target -> its aid."""
    return {part: target.prepare(resources) for part, target in targets().items()}


def score(found: Reconstruction, truth: Truth, aids: Aids = NO_AIDS) -> Scores:
    """Scores an answer, of an attack or of the guess, against the truth of the same observation.

    `aids` are made by `prepare`; without them no missing image is filled in. A ScoringError says
    that the answer is empty, that a part is not what `Reconstruction` promises or differs in number
    from others, or that a metric is not finite.
    """
    answered = {
        part: (target, answer)
        for part, target in targets().items()
        if (answer := target.answer_of(found)) is not None
    }
    for target, answer in answered.values():
        # All parts are checked before any is scored: an answer counts whole or not at all.
        target.check(answer, truth)
    if not answered:
        nouns = ", ".join(f"no {target.noun}" for target in targets().values())
        raise ScoringError(f"the reconstruction is empty: {nouns}")
    counts = {part: len(answer) for part, (target, answer) in answered.items() if target.itemwise}
    if len(set(counts.values())) > 1:
        raise ScoringError(
            f"the reconstruction's parts do not belong together: {counts}; expected as many of each"
        )
    compared = {
        part: target.compare(answer, truth, aids) for part, (target, answer) in answered.items()
    }
    # A loss of NaN, as a guess has, compares as false and is left out.
    means: dict[str, float] = {OWN_LOSS: found.loss} if abs(found.loss) <= LARGEST else {}
    per_image: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for each in compared.values():
        for name, mean in each.means().items():
            if not abs(mean) <= LARGEST:  # so also where it is no number
                raise ScoringError(f"metric {name} is {mean}, which no row can hold")
            means[name] = mean
        per_image |= each.per_image()
        notes |= {n: v.reason for n, v in each.values.items() if isinstance(v, Unavailable)}
        notes |= each.notes
    return Scores(
        means=means,
        per_image=per_image,
        assignments={part: each.assignment for part, each in compared.items() if each.assignment},
        missing=max(each.missing for each in compared.values()),
        notes=notes,
    )


def score_guess(request: GuessRequest, aids: Aids = NO_AIDS) -> dict[str, Any]:
    """Returns the `baseline` of a results row: how a guess without the update scores.

    Each metric has its mean, or None. `name` is the guess's, None without one; `per_image` maps
    metrics to values. `public`, `public_per_image` and `near_copies` are None if nothing public was
    learned from.
    """
    guesses = [target.guess(request, aids) for target in targets().values()]
    made = [guess for guess in guesses if guess is not None]
    fields: dict[str, Any] = {"name": None, **NOT_LEARNED, "per_image": {}, **no_metrics()}
    for guess in made:
        fields |= {**guess.learned, **guess.metrics}
        fields["per_image"] |= guess.per_image
        # Targets come in the order in which they rank: the first guess with a name gives it.
        fields["name"] = fields["name"] or guess.name
    return fields


def measure_chances(request: GuessRequest, aids: Aids = NO_AIDS) -> dict[str, GuessChances]:
    """Returns metric -> bounds on the chance that a guess without the update reaches each level.

    Targets that state none are missing. It is empty unless the observation declares noise.
    """
    seen = request.observation
    if seen is None or not seen.effect.noise:
        return {}
    return {
        name: found
        for target in targets().values()
        for name, found in target.measure_chances(request, aids).items()
    }


def tensors_to_save(
    found: Reconstruction, truth: Truth, scores: Scores, aids: Aids
) -> dict[str, Tensor]:
    """Returns by name the truth and, in its order, the answer that was scored; writes nothing.

    Each target names its own two by `Target.saved_as`. `read_saved` reads them back.

    Args:
        found: the attack's answer.
        truth: the truth of the same observation.
        scores: what `score` returned for both, with the assignments.
        aids: what `prepare` returned; fills the places of missing images.
    """
    tensors: dict[str, Tensor] = {}
    for target in targets().values():
        tensors |= target.tensors_to_save(found, truth, scores.assignments, aids)
    return tensors


def read_saved(tensors: Tensors) -> tuple[Reconstruction, Truth]:
    """Returns (answer, truth) from what `tensors_to_save` returned; the answer's loss is NaN."""
    answers: dict[str, Tensor] = {}
    true: dict[str, Tensor] = {}
    for part, target in targets().items():
        answer, known = target.read_saved(tensors)
        answers |= {} if answer is None else {part: answer}
        true |= known
    found = Reconstruction(loss=math.nan, iterations=0).with_parts(answers)
    return found, Truth.of(true)


def score_other(own: Tensors, other: Tensors, pairs: list[int]) -> Scores:
    """Scores an attack's answer to another update against the truth of this one, as a control.

    `own` and `other` are tensors by name, as `tensors_to_save` returns them. `pairs` are indices of
    the other's rows of a table, one in the place of each own row, and ignored for images. It fails
    as `score`.
    """
    (_, truth), (made, _) = read_saved(own), read_saved(other)
    answers = {
        part: targets()[part].borrow(answer, pairs, truth) for part, answer in made.parts().items()
    }
    return score(made.with_parts(answers), truth)


COSINE = 0.999
"""Least cosine with the true features at which features are right."""
LENGTH = 0.05
"""Largest relative difference of length at which features are right."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """States how many images of an answer an attack certifies to be right, and how many wrongly."""

    images: int
    """Number of images that the attack answered with."""
    determined: int | None
    """Number of images to which the update leaves a single answer; None if the attack is silent."""
    certified: int | None
    """Number of images that the attack certifies to be right; None without certificates."""
    false: int | None
    """Number of certified images that are wrong (`false_certificates`); None if not compared."""
    per_image: dict[str, list[bool]]
    """`determined` and `certified`, where the attack states them -> whether it says so of each true
    image; False where one has no answer. Without a match, in the order of the answer."""


def certificate(
    found: Reconstruction,
    truth: Truth | None,
    assignments: Mapping[str, list[int]] = MappingProxyType({}),
) -> Certificate | None:
    """Returns what an attack certifies of its answer `found`; None if it states nothing.

    `truth` is None if nobody has it. `assignments` are those of the answer's `Scores`; empty if it
    was not scored. A ScoringError says that `found.determined` or `found.certified` is not one bool
    for each image.
    """
    parts = [part for part in (found.features, found.images, found.labels) if part is not None]
    masks = {"determined": found.determined, "certified": found.certified}
    stated = {name: mask for name, mask in masks.items() if mask is not None}
    if not stated or not parts:
        return None
    for name, mask in stated.items():
        if mask.dtype != torch.bool or mask.shape != parts[0].shape[:1]:
            raise ScoringError(
                f"{name}: expected {number_of(len(parts[0]), 'truth value')}, one an image, got "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
    matched = [assignments[part] for part in ("features", "images") if part in assignments]
    # Features come first: certificates are about them, and pictures may be matched otherwise.
    order = matched[0] if matched else range(len(parts[0]))
    told = {name: int(mask.sum()) for name, mask in stated.items()}
    return Certificate(
        images=len(parts[0]),
        determined=told.get("determined"),
        certified=told.get("certified"),
        false=None if truth is None else false_certificates(found, truth),
        per_image={
            # A truth without an answer has no certificate.
            name: [k != MISSING and bool(mask[k]) for k in order]
            for name, mask in stated.items()
        },
    )


def false_certificates(found: Reconstruction, truth: Truth) -> int | None:
    """Returns the number of certified images that match no true image; None if not compared.

    Each true image matches one answer at most. Matching features have a cosine of at least 0.999
    and lengths that differ by at most 5 % of the true one; matching labels are equal. Parts that
    the answer lacks do not count. Nothing is compared if `found.certified` is None, if features and
    labels are both unanswered, or if features are answered and the truth has none.
    """
    if found.certified is None or (found.features is None and found.labels is None):
        return None
    known = truth.tensors()
    if found.features is not None and "features" not in known:
        return None
    chosen = found.certified.detach().cpu().nonzero()[:, 0]
    right = torch.ones(len(chosen), len(known["labels"]), dtype=torch.bool)
    if found.features is not None:
        features, true = found.features.detach().cpu()[chosen], known["features"].detach().cpu()
        right &= _alike(features.double(), true.double())
    if found.labels is not None:
        right &= found.labels.detach().cpu()[chosen][:, None] == known["labels"].cpu()
    from scipy.optimize import linear_sum_assignment

    # At a cost of -1 for each right pair, the cheapest assignment has as many of them as possible.
    rows, columns = linear_sum_assignment(-right.double().numpy())
    return len(chosen) - int(right[rows, columns].sum())


def _alike(features: Tensor, truth: Tensor) -> Tensor:
    """Returns whether features (M, d) are alike to true ones (N, d), for each pair, (M, N) bool."""
    count = len(truth)
    # Of features of zero the cosine is 0.
    pairs = [F.cosine_similarity(each[None], truth, dim=1, eps=1e-30) for each in features]
    cosines = torch.stack(pairs) if pairs else truth.new_zeros(0, count)
    lengths = features.norm(dim=1)[:, None] / truth.norm(dim=1).clamp_min(1e-300)
    alike: Tensor = (cosines >= COSINE) & ((lengths - 1).abs() <= LENGTH)
    return alike
