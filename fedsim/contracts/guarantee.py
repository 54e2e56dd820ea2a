"""Defines what is proven of a defense stack, by mechanisms that an accountant knows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from fedsim.types import FedsimError, LocalTraining, Relation, ReleaseKind, Sampling, Unit


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Describes a Gaussian mechanism: noise on a quantity of bounded contributions.

    `noise_multiplier` is s / C: the noise's standard deviation over the L2 bound of what one `unit`
    contributes. `relation` says what neighbouring data are: under `zero_out` that contribution is
    exchanged for zero and the sensitivity is C; under `replace_one` it is exchanged for any other
    and the sensitivity is 2C. `releases` counts those of one round; `sampling` says how each drew
    its own batch from the client's data (None: an example may be in every one). `correlation` is λ
    where a client's t-th release has the noise z_t - λ z_(t-1), over all its rounds;
    `noise_multiplier` is then that of z_t. `shared` says that the noise is the server's: t counts
    the federation's rounds, whoever takes part in them. `holds` says in words of what the noise
    multiplier depends, if it depends on others than the client.
    """

    noise_multiplier: float
    unit: Unit
    relation: Relation
    releases: int = 1
    sampling: Sampling | None = None
    correlation: float = 0.0
    shared: bool = False
    holds: str = ""

    @property
    def reach(self) -> int:
        """Sensitivity in units of the L2 bound C: 2 under relation `replace_one`, else 1."""
        return 2 if self.relation == "replace_one" else 1


def of_steps(
    noise_multiplier: float, training: LocalTraining, correlation: float = 0.0
) -> Mechanism:
    """Returns the mechanism of Gaussian noise on the sum of clipped gradients of every step.

    Neighbours differ in one example. If each step draws examples independently of each other, it is
    there or not (`zero_out`). Else, or if several steps have one batch, another one is in its place
    (`replace_one`). `training` is that after the stack's training defenses; all else is as in
    `Mechanism`.
    """
    steps = 1 if training.algorithm == "fedsgd" else training.steps
    # One batch for all steps is not drawn anew, and nothing is amplified.
    sampling = training.sampling if steps == 1 or training.batches == "different" else None
    if sampling == "epochs" and steps == 1:
        sampling = "without_replacement"  # each round begins an epoch, whose first batch this is
    independent = sampling is not None and training.sizes_vary
    return Mechanism(
        noise_multiplier=noise_multiplier,
        unit="example",
        # With a fixed size, one example in means another one out, so that it is an exchange.
        relation="zero_out" if independent else "replace_one",
        releases=steps,
        sampling=sampling,
        correlation=correlation,
    )


@dataclass(frozen=True, kw_only=True)
class ExactMechanism(ABC):
    """Base of releases that are no Gaussian mechanism, but whose ε has a proof of its own.

    `relation` says from which neighbours data are hidden: `add_or_remove` are data with and without
    them, `relative` those that keep to an assumption. `accountant` says in a few words how ε is
    found.
    """

    unit: Unit
    relation: Relation
    accountant: str

    @abstractmethod
    def epsilon(self, delta: float, releases: int) -> float:
        """Returns the least proven ε at `delta` of so many independent `releases`; inf if none.

        `delta` is in (0, 1), and there is at least one release.
        """

    def with_share(self, share: float) -> ExactMechanism | None:
        """Returns the release with its noise's variance times `share`; None (default): no proof."""
        return None


@dataclass(frozen=True, kw_only=True)
class CurveMechanism(ABC):
    """Base of releases that are not Gaussian, but compose, as their whole privacy curve is known.

    `beta` is how far neighbours' examples are apart at most, under relation `close`; under
    `relative` neighbours also keep to an assumption. `accountant` says in a few words how the curve
    is found.
    """

    unit: Unit
    relation: Relation
    accountant: str
    beta: float

    @abstractmethod
    def log_delta(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ln δ of the release at each ε >= 0 of `epsilons`, in their shape.

        δ is the largest over all neighbours, in both directions.
        """


@final
@dataclass(frozen=True)
class Composed:
    """Composes independent releases of the same data; a FedsimError if their unit or β differs."""

    parts: tuple[CurveMechanism, ...]
    """One release or more."""

    def __post_init__(self) -> None:
        # A curve hides distances up to its β, and so two βs hold for different neighbours.
        if len({(part.unit, part.beta) for part in self.parts}) > 1:
            raise FedsimError(
                f"mechanisms that hide different things do not compose: {self._names}; give "
                "them the same beta"
            )

    @property
    def unit(self) -> Unit:
        """What all parts hide: a whole `client`, or one `example`."""
        return self.parts[0].unit

    @property
    def relation(self) -> Relation:
        """Relation of neighbours: `relative` if any part's is, else that of the first part."""
        relative = any(part.relation == "relative" for part in self.parts)
        return "relative" if relative else self.parts[0].relation

    @property
    def accountant(self) -> str:
        """How ε is found, in words: the accountants of all parts, and their β."""
        return f"{self._names}, β = {self.parts[0].beta:g}"

    @property
    def _names(self) -> str:
        return " and ".join(part.accountant for part in self.parts)


Proven = Mechanism | ExactMechanism | Composed

Statistic = Literal["features", "kernel"]
"""Statistics that a release may use: features (n, d), or their kernel matrix (n, n)."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """Describes what a closed-form learner releases of a client's rows D, as privacy depends on it.

    `sketch`: D'G, G of standard normal entries. `coefficients`: those of least squares.
    `sketched_coefficients`: those of least squares on a sketch. `normal_coefficients`: a draw of
    the normal distribution that the latter tends to. `kernel_regression`: the predictor, a function
    of `statistics`, and of labels that nothing protects. `kernel_model`: its features and
    coefficients.
    """

    kind: ReleaseKind
    row_norm: float
    """l, the public bound on the L2 norm of a row of D: features and target, or for the kernels 1,
    the norm of the features alone."""
    columns: int
    """r, the number of columns of G; 0 for `coefficients` and kernels."""
    features: int
    """d, the number of features."""
    statistics: tuple[Statistic, ...] = ()
    """Statistics that it is computed from; empty if computed from the rows directly."""
    gain: float = 1.0
    """s, the largest eigenvalue of the public matrix S, in the kernel (x'z)(x'Sz) of two examples'
    features x and z."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """States what is proven of an update on its way through a stack.

    `sensitivity` bounds the L2 norm of the whole update whatever the data (inf: no bound).
    `mechanism` is the release it has been through (None: no proven one, for that `reason`).
    `pooled` is that of the plain mean of all clients' updates, if they share the noise among them;
    else None. `shapes` are those of floating-point tensors; None if not known yet.
    """

    sensitivity: float = math.inf
    mechanism: Proven | None = None
    reason: str = "no noise is added"
    pooled: ExactMechanism | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def entries(self) -> int | None:
        """Number of floating-point entries of the update; None if `shapes` is."""
        return None if self.shapes is None else sum(map(math.prod, self.shapes))

    def bounded(self, norm: float) -> Guarantee:
        """Returns the guarantee after a step that lengthens nothing, to an L2 norm <= `norm`."""
        return replace(self, sensitivity=min(self.sensitivity, norm))

    def unproven(self, reason: str) -> Guarantee:
        """Returns the guarantee after a step that may enlarge the update; `mechanism` stays.

        `reason` says which step; it is kept if no mechanism is proven, and stated where ε is
        infinite.
        """
        # Behind the noise all is post-processing, which no later step can undo.
        reason = self.reason if self.mechanism else reason
        return replace(self, sensitivity=math.inf, reason=reason)
