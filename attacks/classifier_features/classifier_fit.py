"""Features and labels of a batch from the gradient of an ordinary linear classifier.

As long as there are more classes than images, the row space of ∂L/∂W is the features', and there
are more equations than unknowns. All of the gradient is fitted (`Profile`) or, of large problems,
what its row space holds (`Consistency`). Where that explains too little, some images get other
features and labels (exchanges).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from fedsim_attacks._attack_kinds import FeatureAttack, FeatureSolver
from fedsim_attacks.classifier_features._certificates import (
    bound_errors,
    bound_residual,
    certify_images,
    is_explained,
    widen_bounds,
)
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._local_steps import LocalPath
from fedsim_attacks.classifier_features._profile import (
    NARROWED,
    Consistency,
    Fits,
    Profile,
    complete_gradient,
)
from fedsim_attacks.labels.label_inference import infer_labels

_POOL = 128  # images of noise, from whose features each start is drawn
_FIRST = 60  # iterations of the first starts
_EXCHANGED = 40  # iterations after an exchange of images
_EXCHANGES = 128  # exchanges that are tried in a round, at most
_TOGETHER = 8192  # unknowns of all starts that are tried at once, at most
_BETTER = 0.999  # loss over that before, below which an exchange has found something better
_MOST = 3  # images that are replaced at once, at most; one more in each round
_GIVEN_UP = 8  # rounds in a row that find nothing, after which there are no more
_MANY = 1200  # unknowns up to which a fit leaves nothing of the gradient out
_RIVALS = 4  # features of noise from which a rival of a certificate is sought
_DETERMINED = 0.03  # relative error of features (a cosine of 0.9995) up to which they are known


@dataclass(kw_only=True)
class ClassifierSolver(FeatureSolver):
    """Searches the features and labels of a batch that explain a linear classifier's gradient."""

    problem: Consistency | Profile
    """Gradient to explain: by its row space (`Consistency`) or in whole (`Profile`)."""
    pool: Tensor
    """(P, d): features that starts are drawn from."""
    rng: torch.Generator
    labels: Tensor
    """(N,) int64: read off the gradient, from which the search starts."""
    starts: int
    """Unit of the number of starts: four times as many at first, eight times to the end."""
    iterations: int
    exchanges: int
    """Maximum number of `rounds`; it and `iterations` are as in `ClassifierFit`."""
    best: Fits | None = None
    """The best fit so far, of one start; None before any."""
    first: ClassifierSolver | None = None
    """Another search of the same gradient that comes first, as its starts lead to an answer sooner;
    None for none."""
    path: LocalPath | None = None
    """Path of several local steps, whose middle is fitted first; None for a single step."""
    deep: bool = False
    """Whether the best start has been descended to the end."""
    rounds: int = 0
    """Rounds so far in which images were replaced."""
    failed: int = 0
    """Rounds since the last that found anything better."""

    def improve(self) -> None:
        """Takes a step of descent or exchange, or sets `over`. See `FeatureSolver.improve`."""
        if self.first is not None and not self.first.finished:
            self._search(self.first)
        elif self.best is None:
            drawn = self._draw_starts(4 * self.starts)
            self._descend(drawn, self.labels.expand(len(drawn), -1), _FIRST)
        elif self._explained:
            self._end()
        elif not self.deep:
            # The best start is descended to the end, and new ones with it.
            starts = torch.cat([self.best.points, self._draw_starts(8 * self.starts - 1)])
            self._descend(starts, self.best.labels.expand(len(starts), -1), self.iterations)
            self.deep = True
        elif self.rounds == self.exchanges or self.failed == _GIVEN_UP:
            self._end()
        else:
            self._exchange()

    @property
    def _explained(self) -> bool:
        return is_explained(self.problem, float(self.loss))

    def _descend(self, points: Tensor, labels: Tensor, iterations: int) -> None:
        fits = self.problem.descend(points, labels, iterations, bound_residual(self.problem))
        self.iteration += iterations
        self._keep(fits)

    def _exchange(self) -> None:
        """Replaces some images of the best start, in many ways, and descends again."""
        assert self.best is not None
        count, factors = self.problem.classifier.num_images, self.problem.classifier.factors
        unknowns = self.best.points.shape[1]
        drawn = self._draw_starts(_EXCHANGES)
        parts = torch.cat([self.best.points, drawn])[:, : unknowns - factors]
        images = parts.reshape(len(parts), count, (unknowns - factors) // count)
        starts, before = len(drawn), float(self.loss)
        # A random permutation for each start, whose first places are exchanged.
        order = torch.rand(starts, count, generator=self.rng).argsort(1)
        replaced = order < min(count, 1 + self.failed % _MOST)
        # An offset of 1 to K - 1 gives any label but the present one.
        offsets = torch.randint(1, self.problem.classes, (starts, count), generator=self.rng)
        others = (self.best.labels[0] + offsets) % self.problem.classes
        relabelled = replaced & (torch.rand(starts, 1, generator=self.rng) < 0.5)
        labels = torch.where(relabelled, others, self.best.labels[0])
        exchanged = torch.where(replaced[..., None], images[1:], images[0])
        # Factors of clipping stay: they belong to the batch, not to the exchanged images.
        scales = self.best.points[:, unknowns - factors :].expand(len(drawn), -1)
        self._descend(torch.cat([exchanged.flatten(1), scales], 1), labels, _EXCHANGED)
        self.rounds += 1
        self.failed = 0 if float(self.loss) < _BETTER * before else self.failed + 1

    def _end(self) -> None:
        """Ends the search: converges, then corrects for noise, removed entries and local steps."""
        assert self.best is not None
        # Earlier descents stop as soon as all is explained; this one goes on to the minimum.
        self._keep(self.problem.descend(self.best.points, self.best.labels, self.iterations))
        self.iteration += self.iterations
        if isinstance(self.problem, Profile):
            if self.problem.classifier.removed:
                self.problem, self.best = complete_gradient(self.problem, self.best)
                self.loss = self.best.losses[0]
            elif self.problem.classifier.noise:
                self.best = self.problem.narrow(self.best, self.iterations)
                self.iteration += NARROWED * self.iterations
        if self.path is not None:
            features, labels = self.best.features[0], self.best.labels[0]
            self.problem, self.best = self.path.follow(features, labels)
            self.loss = self.best.losses[0]
        first = self.first
        if first is not None and not self._explained and float(first.loss) < float(self.loss):
            self.problem, self.best, self.loss = first.problem, first.best, first.loss
        self.over = True

    def _search(self, first: ClassifierSolver) -> None:
        """Takes a step of the first search; at its end, goes on from its answer or begins anew."""
        first.improve()
        self.iteration, self.loss = first.iteration, first.loss
        if not first.finished:
            return
        assert first.best is not None
        self.loss = torch.full_like(self.loss, torch.inf)
        points = self.problem.unknowns(first.best.features)
        self._descend(points, first.best.labels, self.iterations)
        if not self._explained:
            # The first search keeps its own answer: here all begins anew, and `_end` compares them.
            self.best, self.loss = None, torch.full_like(self.loss, torch.inf)

    def _keep(self, fits: Fits) -> None:
        index = int(fits.losses.nan_to_num(torch.inf).argmin())
        if self.best is None or float(fits.losses[index]) < float(self.loss):
            self.best = Fits(*(each[index : index + 1] for each in fits))
            self.loss = fits.losses[index]

    def _draw_starts(self, most: int) -> Tensor:
        """Draws features of noise to start from: fewer starts (S, n) of a larger problem."""
        images = self.problem.classifier.num_images
        unknowns = self.problem.unknowns(self.pool[:1].expand(1, images, -1)).shape[1]
        count = max(1, min(most, _TOGETHER // max(1, unknowns)))
        chosen = torch.randint(len(self.pool), (count, images), generator=self.rng)
        features = self.pool[chosen]
        # A single image with a bias has a closed form, from which some of the starts begin.
        if (quotient := self.problem.classifier.quotient) is not None:
            features[:: self.starts] = quotient.to(features)
        return self.problem.unknowns(features)

    def reconstruction(self) -> Reconstruction:
        """Returns features (N, d) and labels of `best`, with masks `determined` and `certified`."""
        assert self.best is not None
        features, labels = self.best.features[0], self.best.labels[0]
        errors = widen_bounds(bound_errors(self.problem, self.best, 0))
        certain = (errors < _DETERMINED) & self._explained
        classifier = self.problem.classifier
        # Entries filled in tell nothing new, and what an approximation leaves nobody knows.
        if classifier.removed or classifier.approximation or not classifier.unique:
            certain = torch.zeros_like(certain)
        rivals = (_RIVALS, classifier.num_images)
        drawn = self.pool[torch.randint(len(self.pool), rivals, generator=self.rng)]
        sure = certify_images(classifier, features, labels, drawn)
        if self.path is not None:
            # They were fitted at the path's middle, and are wanted at its beginning.
            features = self.path.drift(features, 0.0)
        return Reconstruction(
            features=features.float(),
            labels=labels,
            determined=certain,
            certified=sure & certain,
            loss=float(self.loss),
            iterations=self.iteration,
        )


@final
class ClassifierFit(FeatureAttack[ClassifierSolver]):
    """Fits features and labels to a linear classifier's gradient, by their own consistency.

    The batch must have fewer images than there are classes; nothing is planted. Clipping leaves one
    factor unknown, which is fitted. Noise leaves features uncertain, and draws them towards what
    the batch shares. Where entries are removed, no image is called determined.
    """

    paper: ClassVar[str] = (
        "fedsim: Levenberg-Marquardt and variable projection (Golub and Pereyra, 1973; Kaufman, "
        "1975) on the softmax consistency of ∂L/∂W, labels by search; nearest: Ma et al., "
        "ICLR 2023 (label counts), and Wang et al., ICLR 2024 (one image)"
    )

    iterations: Annotated[int, Field(ge=1)] = 120
    """Iterations of the last descent, from the best start and new ones."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Random features to start from: four times as many at first, and eight times as many that are
    descended to the end where those explain too little."""
    exchanges: Annotated[int, Field(ge=0)] = 24
    """Rounds in which images may be replaced, where the gradient is not explained."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> ClassifierSolver:
        """Reads labels and draws starts; AttackFailed if no features follow. See `Attack.init`."""
        classifier = ClassifierGradient.read(observation)
        classifier.check()
        small = classifier.num_images * len(classifier.weights) <= _MANY
        path = None
        if small and LocalPath.suits(observation, classifier):
            path = LocalPath(observation, rng)
            if path.is_told:
                observation, classifier = path.observation, path.classifier
            else:
                path = None
        # The model's own features of noise lie where its activations can, as above 0 behind a ReLU.
        noise = torch.randn(_POOL, *observation.model.input_shape, generator=rng)
        noise = noise.to(classifier.weights.device)
        weights = observation.parameters, observation.buffers
        pool = features_of(rebuild(observation), *weights, noise, observation.training)
        labels = infer_labels(observation)
        # `Profile` holds one gradient with one factor at most; `Consistency` takes the rest.
        whole = small and not classifier.rates and classifier.factors <= 1
        if classifier.removed and not whole:
            raise AttackFailed(
                "a defense sets entries to zero, which is made up for after one local step without "
                "clipped examples, and where images times classes are "
                f"{number_of(_MANY, 'error signal')} at most"
            )
        solver = ClassifierSolver(
            loss=torch.full((), torch.inf),
            problem=Profile(classifier) if whole else Consistency(classifier),
            path=path,
            pool=pool,
            rng=rng,
            labels=labels,
            starts=self.starts,
            iterations=self.iterations,
            exchanges=self.exchanges,
        )
        # Only the row space of an exact gradient is that of the features.
        if whole and classifier.exact and not path:
            solver.first = replace(solver, problem=Consistency(classifier))
        return solver
