"""Scores features: inputs (N, d) of the model's head, of the batch that made an update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.metric import (
    GuessChances,
    Metric,
    MetricValue,
    ScoredPair,
    ScoringError,
    TensorMetric,
    Term,
    Unavailable,
    align,
    bound_chances,
    match,
    ordered,
)
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess, TargetScores
from fedsim.scoring.guess import Guesser
from fedsim.targets.images import aid_of, count_answers
from fedsim.types import FedsimError, Observation, Truth, as_pixels

_MOST = 256
"""Maximum number of public images for the guess, which tell the directions in common."""
_DEPENDENT = 1e-12
"""Singular value of unit vectors below which a direction is mere rounding."""


def _check_features(features: Tensor, what: str) -> None:
    """Refuses tensors that are no finite batch (N, d) of features; `what` names them."""
    if features.ndim != 2 or features.numel() == 0:
        raise ScoringError(
            f"{what}: expected features of shape (N, d), got {tuple(features.shape)}"
        )
    if not bool(torch.isfinite(features).all()):
        raise ScoringError(f"{what}: the features are not finite")


def _feature_cosine(reconstruction: Tensor, truth: Tensor) -> Tensor:
    return F.cosine_similarity(reconstruction.double(), truth.double(), dim=1, eps=1e-30)


def _feature_error(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns ||r - t|| / ||t|| of reconstructed r and true t (N, d): (N,), unless a t is 0."""
    norm = torch.linalg.vector_norm(truth.double(), dim=1)
    if not bool(norm.all()):
        return Unavailable("a true feature vector is zero, so there is no relative error")
    error = torch.linalg.vector_norm(reconstruction.double() - truth.double(), dim=1)
    relative: Tensor = error / norm
    return relative


def subspace_error(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the part of each true feature outside the reconstructed span: (N,) in [0, 1].

    Each true feature (N, d), scaled to unit length, is projected onto the orthogonal complement of
    the span of the first N reconstructed ones; the part is the projection's norm. A guess of zero
    has 1. If a true feature is zero, an `Unavailable` says so.

    Source: Liu et al., Data Reconstruction Attacks and Defenses, section 4.1, who report the mean.
    """
    truth = truth.double()
    norm = torch.linalg.vector_norm(truth, dim=1, keepdim=True)
    if not bool(norm.all()):
        return Unavailable("a true feature vector is zero, so it has no direction")
    claimed = reconstruction[: len(truth)].double()
    scale = torch.linalg.vector_norm(claimed, dim=1, keepdim=True)
    # Unit length first, so that no direction counts less for being short; zeros stay zero.
    claimed = claimed / torch.where(scale > 0, scale, torch.ones_like(scale))
    _, values, basis = torch.linalg.svd(claimed, full_matrices=False)
    # An orthonormal basis of the span, without directions that are mere rounding.
    basis = basis[values > _DEPENDENT]
    unit = truth / norm
    # Twice is enough (Kahan and Parlett): the second pass removes what rounding left of the first.
    for _ in range(2):
        unit = unit - (unit @ basis.T) @ basis
    outside: Tensor = torch.linalg.vector_norm(unit, dim=1).clamp(max=1)
    return outside


def _principal_angles(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the angles in degrees between reconstructed and true feature spans, (N,).

    Both are (N, d), on the CPU; of more reconstructed features the first N count. Angles ascend
    from 0 (a direction of both) to 90 (one that the reconstruction lacks). The reason is returned
    where the true features are linearly dependent.

    Source: Björck and Golub, Numerical Methods for Computing Angles Between Linear Subspaces, 1973.
    """
    from scipy.linalg import subspace_angles

    count = len(truth)
    directions = F.normalize(truth.double(), dim=1)
    if int((torch.linalg.svdvals(directions) > _DEPENDENT).sum()) < count:
        return Unavailable(
            "the true features are linearly dependent, so they span fewer directions"
        )
    claimed = F.normalize(reconstruction[:count].double(), dim=1)
    degrees = torch.full((count,), 90.0, dtype=torch.float64)
    # Features of zero span nothing: all their angles stay at 90 degrees.
    if claimed.any():
        angles = torch.from_numpy(subspace_angles(directions.T.numpy(), claimed.T.numpy()))
        # scipy lists the largest angle first.
        degrees[: len(angles)] = torch.rad2deg(angles).flip(0)
    return degrees


def _of_span(function: TensorMetric) -> Callable[[ScoredPair], MetricValue]:
    """Adapts a function of spans, which takes all returned vectors, matched to a truth or not."""
    return lambda pair: function(
        pair.claimed if pair.unordered is None else pair.unordered, pair.truth
    )


_FEATURES = Term(
    key="features",
    name="feat, span",
    meaning="Recovered inputs of the model’s head. feat: their mean cosine with the true ones. "
    "span: share of the true features outside the span of the recovered ones; 0 is exact.",
)


class Features(Target):
    """Scores inputs of the model's head, in any order."""

    part: ClassVar[str] = "features"
    """Name of answers (M, d), and of the truth (N, d): head's inputs under the global weights."""
    noun: ClassVar[str] = "features"
    singular: ClassVar[str] = "feature"
    order: ClassVar[float] = 1.0
    itemwise: ClassVar[bool] = True
    ranks_by: ClassVar[Any] = "mean"
    leaks: ClassVar[float] = 0.5
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="subspace_error",
            compute=_of_span(subspace_error),
            unit="share",
            larger_leaks=False,
            uninformed=1.0,
            heading="span",
            meaning="share of the true features outside the span of the recovered ones",
            described=_FEATURES,
            digits=3,
            narrow="late",
        ),
        Metric(
            name="feature_cosine",
            compute=ordered(_feature_cosine),
            unit="none",
            larger_leaks=True,
            uninformed=0.0,
            heading="feat",
            meaning="mean cosine of the features",
            described=_FEATURES,
            narrow="late",
        ),
        Metric(
            name="feature_error",
            compute=ordered(_feature_error),
            unit="relative",
            larger_leaks=False,
            uninformed=1.0,
        ),
        Metric(
            name="principal_angle",
            compute=_of_span(_principal_angles),
            unit="degrees",
            larger_leaks=False,
            uninformed=90.0,
        ),
    )

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is finite (M, d), d being that of a known truth."""
        _check_features(answer, "reconstruction")
        true = self.truth_of(truth)
        if true is None:
            return
        _check_features(true, "truth")
        self.check_each(answer, true)

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Scores a checked answer (M, d), matched by direction; for spans all its vectors count.

        An unmatched truth counts as answered by 0. Without recorded ones metrics are unavailable.
        """
        true = self.truth_of(truth)
        if true is None:
            return TargetScores(values=self.unavailable("the true features were not recorded"))
        claimed, true = answer.detach().cpu(), true.detach().cpu()
        # Between unit vectors the least squared distance is the largest cosine.
        units = [F.normalize(each.double(), eps=1e-30) for each in (claimed, true)]
        assignment = match(*units)
        # For spans the answer is compared as it came: they have neither order nor missing vectors.
        matched = align(claimed, assignment, self.filling(true, aids))
        pair = ScoredPair(claimed=matched, truth=true, unordered=claimed)
        return TargetScores(values=self.compute_metrics(pair), assignment=assignment)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the score of features computed from public images.

        None says that these, the observation or true features are missing, or that the attack
        answered other parts alone.
        """
        true = self.truth_of(request.truth)
        # Beside an attack that answers no features none are guessed; beside a failed one they are.
        silent = request.found is not None and request.found.features is None
        # The body that they take is built only for features to compare them with.
        public = None if true is None or silent else _public_features(request, aids)
        if true is None or public is None:
            return None
        return TargetGuess(metrics=self.guessed_from(public, true))

    def measure_chances(self, request: GuessRequest, aids: Aids) -> Mapping[str, GuessChances]:
        """Returns {`feature_cosine`: chances of a public image's features to reach each level}.

        It is empty for a table, for a failed attack, or where `guess` returns None.
        """
        true, guesser = self.truth_of(request.truth), aid_of(aids).guesser
        if true is None or request.found is None or request.found.features is None:
            return {}
        public = _public_features(request, aids)
        if public is None or not isinstance(guesser, Guesser):
            return {}
        labels = guesser.public_labels(_MOST)[: len(public)]
        units = F.normalize(public.double(), dim=1)
        # Each public image stands for the truth once, so that chances are exact over that prior.
        levels = tuple(step / 100 for step in range(101))
        chances = bound_chances(
            (units @ units.T).clamp(-1, 1).acos(),
            [math.acos(level) for level in levels],
            labels if request.granted.labels == "known" else None,
        )
        answers = count_answers(request, self, len(true))
        found = GuessChances(levels=levels, chances=chances, candidates=len(units), answers=answers)
        return {"feature_cosine": found}

    def guessed_from(self, public: Tensor, truth: Tensor) -> dict[str, float]:
        """Returns metric -> mean score of guessing features `truth` (N, d) from `public` (P, d)."""
        truth = truth.detach().cpu()
        units = F.normalize(public.double(), dim=1)
        # The first right singular vectors leave least outside their span (Eckart and Young).
        _, _, directions = torch.linalg.svd(units, full_matrices=False)
        mean = public.double().mean(0).expand(len(truth), -1)
        pair = ScoredPair(claimed=mean, truth=truth, unordered=directions[: len(truth)])
        return TargetScores(values=self.compute_metrics(pair)).means()


def _public_features(request: GuessRequest, aids: Aids) -> Tensor | None:
    """Returns features (P, d) of public images, float32 on the CPU, as a client's, or None."""
    observation, guesser = request.observation, aid_of(aids).guesser
    if observation is None or guesser is None:
        return None
    images = guesser.public(_MOST)
    # Attacks, trials and, in the first round, all defenses see the same weights.
    state = {**observation.parameters, **observation.buffers, "": images}
    content = hashlib.sha256(repr((observation.model, observation.effect.model)).encode())
    content.update(repr(observation.training).encode())
    for name, tensor in state.items():
        content.update(name.encode())
        content.update(tensor.detach().cpu().numpy().tobytes())
    key = content.digest()
    if key not in _recent:
        if len(_recent) >= _RECENT:
            del _recent[next(iter(_recent))]
        _recent[key] = _compute_features(observation, images)
    return _recent[key]


_RECENT = 8
_recent: dict[bytes, Tensor | None] = {}
"""Digest of a model and of public images -> their features, oldest first."""


def _compute_features(observation: Observation, images: Tensor) -> Tensor | None:
    from fedsim.models.base import normalize
    from fedsim.models.local import features_of
    from fedsim.models.victim import rebuild

    model = rebuild(observation)
    device = observation.device
    size = min(observation.training.batch_size, len(images))
    parts = []
    try:
        for batch in torch.split(images[: len(images) // size * size], size):
            inputs = normalize(as_pixels(batch.to(device)), observation.model)
            parts.append(
                features_of(
                    model, observation.parameters, observation.buffers, inputs, observation.training
                ).cpu()
            )
    except (FedsimError, ValueError):  # batch norm of a single value per channel
        return None
    return torch.cat(parts)
