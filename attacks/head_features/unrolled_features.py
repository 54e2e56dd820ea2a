"""Features of the first of several local steps on the same batch, from a fit of all.

A client's steps move its features, and the update is, up to the head's own small motion, the
gradient of a batch of N E images. The row space of ∂L/∂W holds them: N E coordinates in it replace
d. And the head before the first step is known, and so is the error signal that a feature of that
step must have, N D = softmax(f(x)) - y.

So ∂L/∂A is fitted first with N features, and then, each copied to E, with N E of them; the N that
the first head explains are those of the first step. If it explains them badly, the fit hops on from
the best so far (Wales and Doye, Global Optimization by Basin-Hopping, 1997).
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import FeatureAttack, FeatureSolver
from fedsim_attacks.head_features._head_gradient import HeadGradient, find_norms
from fedsim_attacks.head_features.head_fit import OutputFit, OutputSolver, random_starts
from fedsim_attacks.head_features.spectral_features import span

_STARTS = 4  # random starts of the first trial
_WEIGHTS = 1 << 16  # weights of the neurons that a fit starts with; trials make up for too few
_SPREAD = 0.5  # spread of an image's features over the steps at the start, relative
_HOPS = (0.6, 0.3)  # relative sizes of the perturbation before the next trial, by turns
_EXPLAINED = 0.04  # relative residual of an error signal up to which the first head explains it
_SAME = 0.98  # cosine from which two features of one label count as one
_PLAUSIBLE = 4.0  # factor of the usual length, or one over it, up to which one is plausible
_STATIC, _NEARLY_STATIC = 2e-3, 2e-2
"""Residual of ∂L/∂A with one feature an image, below which it is that of each step, or nearly."""


class UnrolledSolver(FeatureSolver):
    """Fits the features of all local steps, in trials, until the first step's are explained."""

    def __init__(
        self, head: HeadGradient, iterations: int, trials: int, rng: torch.Generator
    ) -> None:
        """Prepares a trial; AttackFailed if the hidden weights' gradient is not exact, or is 0.

        Args:
            head: the observed gradient.
            iterations: iterations of each fit, at most.
            trials: fits at most; the first that is consistent ends the search.
            rng: stream of the random starts, on the CPU.
        """
        if not head.exact:
            raise AttackFailed(
                "noise, pruning or quantization has left no exact row space to unroll steps in: "
                "use head_fit"
            )
        if not head.grad_hidden.any():
            raise AttackFailed(
                "nothing is left of ∂L/∂W, whose rows hold the features of all steps"
            )
        # Each step's rows are in the span of its features: N E directions hold all of them.
        size = min(head.num_images * head.steps, head.hidden.shape[1])
        inside = head.restrict(span(head.grad_hidden, size)[0].to(head.hidden.dtype))
        starts = list(random_starts(inside, _STARTS, rng))
        fit = OutputFit(inside, starts, weights=_WEIGHTS)
        super().__init__(loss=fit.loss)
        self.head, self.rng, self.iterations, self.trials = inside, rng, iterations, trials
        self.static = head.steps == 1
        """Whether features are the same in all steps, which then are one."""
        self.fit = self.lowest = OutputSolver(fit, iterations)
        """The present trial, and the one that explains most of ∂L/∂A: the next one hops from it."""
        self.has_steps = False
        """Whether `fit` has a feature for each step."""
        self.first_step = fit.features
        """(N, N E): the best features of the first step so far."""
        self.common: Tensor | None = None
        """(N, N E): one feature for each image, if that nearly fits all steps; else None."""
        self.ended = 0
        """Number of trials that have ended."""

    @property
    def finished(self) -> bool:
        """Whether the first step's features are explained, or all trials have ended."""
        return float(self.loss) < _EXPLAINED or self.ended >= (1 if self.static else self.trials)

    def improve(self) -> None:
        """Takes a step of the present fit, or ends the trial. See `FeatureSolver.improve`."""
        if not self.fit.finished:
            before = self.fit.iteration
            self.fit.improve()
            self.iteration += self.fit.iteration - before
        elif not self.static and not self.has_steps:
            self._fit_steps()
        else:
            self._end_trial()

    def reconstruction(self) -> Reconstruction:
        """Returns features (N, d) of the first step, or of all steps where only such nearly fit."""
        apart = self.common is None or self.loss < _EXPLAINED
        features = self.first_step if self.common is None or apart else self.common
        return Reconstruction(
            features=self.head.lift(features).float(),
            loss=float(self.loss),
            iterations=self.iteration,
        )

    def _fit_steps(self) -> None:
        """Gives every image a feature for each step, unless one explains them all."""
        fitted = self.fit.attempt
        if fitted.loss.sqrt() < _STATIC:
            self.static = True
            return
        if fitted.loss.sqrt() < _NEARLY_STATIC:
            self.common = _select_explained(self.head, fitted.features, self.fit.errors)[0]
        # One feature an image is the mean of its steps': each starts there, apart by chance.
        copies = fitted.features.repeat(self.head.steps, 1)
        self.fit, self.has_steps = self._perturb(copies, _SPREAD), True

    def _perturb(self, features: Tensor, by: float) -> OutputSolver:
        noise = torch.randn(features.shape, generator=self.rng).to(features)
        unit = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        start = features + by * unit * F.normalize(noise, dim=1)
        # An image's features are alike: they are not to be merged.
        fit = OutputFit(self.head, [start], splitting=False, weights=_WEIGHTS)
        return OutputSolver(fit, self.iterations)

    def _end_trial(self) -> None:
        """Keeps the trial's features if the first head explains them better, and hops on."""
        fitted, errors = self.fit.attempt, self.fit.errors
        # A step's error signal enters the mean gradient by its share alone.
        features, loss = _select_explained(
            self.head, fitted.features, errors / self.head.first_share
        )
        if self.static:  # errors may have stayed, or have vanished after the first step
            same, misfit = _select_explained(self.head, fitted.features, errors)
            features, loss = same if misfit < loss else features, fitted.loss.sqrt()
        if loss < self.loss:
            self.first_step, self.loss = features, loss
        # Basin hopping (Wales and Doye, 1997): on from the lowest minimum, not from the last.
        if not self.ended or fitted.loss < self.lowest.loss:
            self.lowest = self.fit
        hop = _HOPS[self.ended % len(_HOPS)]
        self.fit = self._perturb(self.lowest.attempt.features, hop)
        self.ended += 1


def _select_explained(
    head: HeadGradient, features: Tensor, errors: Tensor
) -> tuple[Tensor, Tensor]:
    """Selects the N of `features` (n, d) that the head explains best, and the worst's residual."""
    # They are in their true lengths. The residual is 1 or more if its length is implausible.
    factors, misfit = find_norms(head, features, errors)
    length = factors * torch.linalg.vector_norm(features, dim=1)
    # An error signal of one label alone is explained by almost any feature that is long enough, and
    # one of a doubtful head by any that is short enough. The N of least misfit whose lengths are
    # alike set the standard of a plausible one.
    apart = (length[:, None] / length).log().abs() > math.log(_PLAUSIBLE)
    least = (misfit + apart.to(misfit)).sort(dim=1).values
    standard = least[:, min(head.num_images, len(misfit)) - 1].argmin()
    misfit = misfit + apart[standard].to(misfit)
    order = _distinct_first(features, errors, misfit)[: head.num_images]
    return features[order] * factors[order, None], misfit[order].max().sqrt()


def _distinct_first(features: Tensor, errors: Tensor, misfit: Tensor) -> Tensor:
    """Sorts indices by `misfit`, those of features that repeat a better one last."""
    # A feature may be found in parts, of nearly one direction and one label, each explained.
    label = errors.argmin(0)
    alike = F.normalize(features, dim=1) @ F.normalize(features, dim=1).T > _SAME
    alike &= label[:, None] == label
    order = misfit.argsort().tolist()
    repeated = [i for at, i in enumerate(order) if alike[i, order[:at]].any()]
    return torch.tensor([i for i in order if i not in repeated] + repeated, device=misfit.device)


@final
class UnrolledFeatures(FeatureAttack[UnrolledSolver]):
    """Fits the features of all local steps in the update's row space, and tells the first step's.

    The row space has to be exact: no noise, pruning or quantization. The loss is the largest part
    of a feature's error signal that the head before the first step does not imply. If features are
    the same in all steps, it is the part of ∂L/∂A, the output weights' gradient, left unexplained.
    """

    paper: ClassVar[str] = (
        "fedsim: variable projection (Golub and Pereyra, 1973) over all steps of Liu et al.'s "
        "local aggregation, section 3"
    )

    iterations: Annotated[int, Field(ge=100)] = 1500
    """Iterations of L-BFGS in each trial; it mostly ends earlier."""
    trials: Annotated[int, Field(ge=1)] = 16
    """Largest number of fits, of which the first that is consistent ends the search."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> UnrolledSolver:
        """Draws starts; AttackFailed if the row space is not exact, or empty. See `Attack.init`."""
        head = HeadGradient.read(observation)
        return UnrolledSolver(head, self.iterations, self.trials, rng)

    def total(self) -> int:
        """Returns the number of iterations of all trials. See `Attack.total`."""
        return self.iterations * (1 + self.trials)
