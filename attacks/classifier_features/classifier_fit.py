"""Features and labels of a batch from the gradient of an ordinary linear classifier.

Nobody has planted anything, and nothing is granted: the server is honest, the classifier the one
that is trained. As long as there are more classes than images, the row space of ∂L/∂W is the
features', and there are more equations than unknowns. All of the gradient is fitted (`profile`) or,
of large problems, what its row space holds (`consistency`). Several local steps are followed along
the path of the weights (`local_steps`). Labels are part of what is fitted (`label_search`); entries
that pruning removed are filled in (`completion`). How far rounding and noise leave the features
open is computed for each image (`certainty`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import features_of
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks.classifier_features._certainty import (
    allowed,
    beyond_first_order,
    explained,
    relative_errors,
)
from fedsim_attacks.classifier_features._certificates import certified
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._completion import complete
from fedsim_attacks.classifier_features._consistency import Consistency, Fits
from fedsim_attacks.classifier_features._label_search import neighbours
from fedsim_attacks.classifier_features._local_steps import LocalPath
from fedsim_attacks.classifier_features._profile import NARROWED, Profile
from fedsim_attacks.head_features._feature_solver import FeatureAttack, FeatureSolver
from fedsim_attacks.labels.label_inference import infer_labels

_POOL = 128
"""Images of noise, of whose features each start is drawn."""
_TRIAL = 30
"""Iterations after which labels are told apart."""
_TRIED_TOGETHER = 12
"""Labelings that are compared before the search goes on from the best."""
_MANY = 1200
"""Unknowns up to which a fit leaves nothing of the gradient out; beyond, it keeps the row space."""
_RIVALS = 4
"""Features of noise from which a rival of a certificate is sought."""
_DETERMINED = 0.03
"""Relative error of features (a cosine of 0.9995) up to which they are determined."""


@dataclass(kw_only=True)
class ClassifierSolver(FeatureSolver):
    """Searches labels and features together; the best ones are descended to the end."""

    problem: Consistency | Profile
    pool: Tensor
    """(P, d): features that starts are drawn from."""
    rng: torch.Generator
    starts: int
    """For each labeling that is tried; eight times as many in the end."""
    iterations: int
    """Of the last descent."""
    waiting: list[Tensor]
    """Labelings (N,) to be tried next."""
    likely: Tensor
    """(K,): how often each class was read off the gradient."""
    labelings: int
    """How many may be tried."""
    tried: set[tuple[int, ...]] = field(default_factory=set)
    best: Fits | None = None
    """Of one start."""
    other: Consistency | None = None
    """What is searched as well where `problem` ends unexplained: starts lead elsewhere there."""
    path: LocalPath | None = None
    """Of several local steps, as long as their middle is fitted."""
    over: bool = False

    @property
    def finished(self) -> bool:
        """Whether the best labels' features have been descended to the end."""
        return self.over

    def improve(self) -> None:
        """Tries the labelings that wait; or, if none is left, ends with the best ones."""
        if not self.waiting:
            self._end()
            return
        count = len(self.waiting)
        many, trial = (self.starts, _TRIAL) if self.tried else (4 * self.starts, 2 * _TRIAL)
        # Starts of a large problem follow each other, and the first that explains all is the last.
        labels = torch.stack(self.waiting).repeat_interleave(many, 0)
        enough = allowed(self.problem)
        fits = self.problem.descend(self._drawn(len(labels)), labels, trial, enough)
        self.iteration += trial
        self.tried |= {tuple(each.tolist()) for each in self.waiting}
        self.waiting = self.waiting[count:]
        before = self.best
        self._keep(fits)
        assert self.best is not None
        if explained(self.problem, float(self.loss)) or len(self.tried) >= self.labelings:
            self.waiting = []
        elif before is None or self.best is not before:
            self._queue = neighbours(self.best.labels[0], self.likely)
            self.waiting = self._next()
        else:
            self.waiting = self._next()

    def _next(self) -> list[Tensor]:
        found = []
        for labels in self._queue:
            if tuple(labels.tolist()) not in self.tried:
                found.append(labels)
            if len(found) == _TRIED_TOGETHER:
                break
        return found

    def _end(self) -> None:
        assert self.best is not None
        starts = self.best.points
        if not explained(self.problem, float(self.loss)):
            starts = torch.cat([starts, self._drawn(8 * self.starts - 1)])
        labels = self.best.labels.expand(len(starts), -1)
        self._keep(self.problem.descend(starts, labels, self.iterations))
        self.iteration += self.iterations
        if isinstance(self.problem, Profile):
            if self.problem.classifier.removed:
                self.problem, self.best = complete(self.problem, self.best)
                self.loss = self.best.losses[0]
            elif self.problem.classifier.noise:
                self.best = self.problem.narrowed(self.best, self.iterations)
                self.iteration += NARROWED * self.iterations
        if self.path is not None:
            features, labels = self.best.features[0], self.best.labels[0]
            self.problem, self.best = self.path.followed(features, labels)
            self.loss = self.best.losses[0]
        self.over = True
        if self.other is not None and not explained(self.problem, float(self.loss)):
            self._search_other(self.other)

    def _search_other(self, problem: Consistency) -> None:
        """Searches once more, in another problem; keeps what explains more."""
        search = replace(
            self,
            problem=problem,
            other=None,
            loss=torch.full_like(self.loss, torch.inf),
            waiting=[torch.repeat_interleave(self.likely)],
            tried=set(),
            best=None,
            over=False,
        )
        while not search.finished:
            search.improve()
        self.iteration = search.iteration
        if float(search.loss) < float(self.loss):
            self.problem, self.best, self.loss = problem, search.best, search.loss

    def _keep(self, fits: Fits) -> None:
        index = int(fits.losses.nan_to_num(torch.inf).argmin())
        if self.best is None or float(fits.losses[index]) < float(self.loss):
            self.best = Fits(*(each[index : index + 1] for each in fits))
            self.loss = fits.losses[index]

    def _drawn(self, count: int) -> Tensor:
        images = self.problem.classifier.num_images
        chosen = torch.randint(len(self.pool), (count, images), generator=self.rng)
        features = self.pool[chosen]
        if (quotient := self.problem.classifier.quotient) is not None:
            features[:: self.starts] = quotient.to(features)
        return self.problem.unknowns(features)

    def reconstruction(self) -> Reconstruction:
        """Returns the best features, their labels, and which are determined and certified."""
        assert self.best is not None
        errors = beyond_first_order(relative_errors(self.problem, self.best, 0))
        certain = (errors < _DETERMINED) & explained(self.problem, float(self.loss))
        classifier = self.problem.classifier
        # Entries filled in tell nothing new, and what an approximation leaves nobody knows.
        if classifier.removed or classifier.approximation or not classifier.unique:
            certain = torch.zeros_like(certain)
        drawn = torch.randint(
            len(self.pool), (_RIVALS, self.problem.classifier.num_images), generator=self.rng
        )
        sure = certified(
            self.problem.classifier, self.best.features[0], self.best.labels[0], self.pool[drawn]
        )
        features = self.best.features[0]
        if self.path is not None:
            features = self.path.drift(features, 0.0)
        return Reconstruction(
            features=features.float(),
            labels=self.best.labels[0],
            determined=certain,
            certified=sure & certain,
            loss=float(self.loss),
            iterations=self.iteration,
        )


@final
class ClassifierFit(FeatureAttack[ClassifierSolver]):
    """Fits features and labels to a linear classifier's gradient, by their own consistency.

    It needs fewer images than classes, and plants nothing. Clipping leaves one factor unknown,
    which is fitted; noise leaves the features as uncertain as it is large, and those are drawn to
    what the batch shares. Where entries are removed no image is called determined.
    """

    paper: ClassVar[str] = (
        "fedsim: Levenberg-Marquardt and variable projection (Golub and Pereyra, 1973; Kaufman, "
        "1975) on the softmax consistency of ∂L/∂W, labels by search; nearest: Ma et al., "
        "ICLR 2023 (label counts), and Wang et al., ICLR 2024 (one image)"
    )

    iterations: Annotated[int, Field(ge=1)] = 120
    """Of the last descent, from the best start and new ones."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Random features that each labeling is tried with; eight times as many in the end."""
    labelings: Annotated[int, Field(ge=1)] = 400
    """How many labelings may be tried."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> ClassifierSolver:
        """Reads labels off the gradient, and draws features of images of noise to start from.

        Raises:
            AttackFailed: the model does not end with a linear classifier of more classes than
                images, or a defense has left nothing of its gradient's row space.
        """
        classifier = ClassifierGradient.of(observation)
        classifier.check()
        small = classifier.num_images * len(classifier.weights) <= _MANY
        path = None
        if small and LocalPath.suits(observation, classifier):
            path = LocalPath(observation, rng)
            if path.is_told:
                observation, classifier = path.observation, path.classifier
            else:
                path = None
        model = rebuild(observation)
        noise = torch.randn(_POOL, *observation.model.input_shape, generator=rng)
        device = classifier.weights.device
        pool = features_of(
            model,
            observation.parameters,
            observation.buffers,
            noise.to(device),
            observation.training,
        )
        labels = infer_labels(observation).sort()[0]
        whole = small and not classifier.rates and classifier.factors <= 1
        if classifier.removed and not whole:
            raise AttackFailed(
                "a defense sets entries to zero, which is made up for after one local step without "
                "clipped examples, and where images times classes are "
                f"{number_of(_MANY, 'error signal')} at most"
            )
        return ClassifierSolver(
            loss=torch.full((), torch.inf),
            problem=Profile(classifier) if whole else Consistency(classifier),
            other=Consistency(classifier) if whole and classifier.exact and not path else None,
            path=path,
            pool=pool,
            rng=rng,
            starts=self.starts,
            iterations=self.iterations,
            waiting=[labels],
            likely=torch.bincount(labels, minlength=len(classifier.weights)),
            labelings=self.labelings,
        )
