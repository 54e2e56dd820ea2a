"""The least-squares mechanism: coefficients from regularized rows, private by their randomness."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import DataDefense
from fedsim.contracts.guarantee import ExactMechanism, Guarantee, Release
from fedsim.privacy.mechanisms import least_squares
from fedsim.privacy.mechanisms.least_squares import RegressionRelease
from fedsim.privacy.mechanisms.projection import ProjectionRelease, bound, lowering
from fedsim.types import FedsimError, Relation
from fedsim_defenses.random_projection import (
    largest_leverage,
    largest_residual,
    max_leverage,
    require,
)

_UP = 1 + 1e-7
"""Factor on σ that covers the tolerance of the largest leverage, so that ε is not exceeded."""


@final
class LeastSquaresMechanism(DataDefense):
    """Makes coefficients (ε, δ)-private: the learner regresses on [D; σ I], D = [B, b].

    B are the features and b the targets. The rows σ I are appended to D, and σ is in the units of
    the rows. l is the public bound on the L2 norm of a row of D.

    With method `ls` of learner least_squares the release is the paper's mechanism M_LS. Its curve
    is exact at any leverages p in B and q in [B, b] of the row that is hidden. σ holds q to the
    largest bound at which every p <= q is private. With `als` it is the paper's M_ALS, of which
    only the limit for many columns is known exactly. It is accounted as computed from a sketch,
    which is proven. One row is hidden, against its absence.
    """

    paper: ClassVar[str] = (
        "Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum "
        "and its Application to Privacy-Preserving Machine Learning, Figures 4, 11 and 13"
    )

    epsilon: Annotated[float, Field(gt=0, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    calibration: Literal["tight", "paper"] = "tight"
    """`tight`: the least σ at which the claim is proven. `paper`: that of leverages l²/σ² in B and
    2 l²/σ² in [B, b], which no row has, on the assumption that δ increases in both (it does not);
    what it truly gives is what the ledger states."""
    leverage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest leverage of a row in [B, b], in any database that is to be hidden among. Below 1
    the claim is *relative*: it holds among those databases alone, and whoever computes it from the
    data reveals something by it."""

    residual: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest share of a row in the squared residuals, in any such database. It makes noise
    needless for coefficients of method `ls`; where noise is needed it is of no use, since rows σ I
    may enlarge residuals."""

    @property
    def assumes(self) -> bool:
        """Whether a leverage or a residual below 1 is declared. See `DataDefense.assumes`."""
        return min(self.leverage, self.residual) < 1

    def check(self, clients: Mapping[int, Tensor]) -> None:
        """Refuses, by a FedsimError, rows (n, d + 1) that exceed `leverage` or `residual`."""
        for client, rows in clients.items():
            of, leverage = f"client {client}", largest_leverage(rows)
            require("least_squares.leverage", self.leverage, leverage, rows, of)
            if self.residual < 1:
                require("least_squares.residual", self.residual, largest_residual(rows), rows, of)

    def sigma(self, release: Release) -> float:
        """Returns σ of the appended rows σ I, in units of rows; 0 if none is needed.

        A FedsimError refuses releases by a method but `ls` and `als`, and what no σ makes private.
        """
        kind, r, d = release.kind, release.columns, release.features
        if kind not in ("normal_coefficients", "sketched_coefficients"):
            raise FedsimError(
                "least_squares protects coefficients that are random: those of learner "
                "least_squares with method ls or als; use one of them (for sketches: the defense "
                "random_projection)"
            )
        of_sketch = kind == "sketched_coefficients"
        if self.assumes and not of_sketch:
            known = (self.leverage, self.residual, r, d, self.epsilon, self.delta)
            if least_squares.is_private(*known):
                return 0.0
        # A sketch's curve depends on its columns alone; that of coefficients on the features, too.
        allowed = max_leverage(self.epsilon, self.delta, r, None if of_sketch else d)
        least = lowering(allowed, release.row_norm, self.leverage)
        least *= 1.0 if of_sketch else _UP
        if self.calibration == "tight" or least == 0:
            return least
        return release.row_norm * _paper_sigma(self.epsilon, self.delta, r, d)

    def guarantee(self, release: Release) -> Guarantee:
        """Returns the mechanism at the largest leverage that a row keeps; errors as `sigma`."""
        # The claim follows from the σ in use, so that `paper` noise is stated for what it gives.
        sigma = self.sigma(release)
        leverage = bound(sigma, release.row_norm, self.leverage)
        relation: Relation = "relative" if self.assumes else "add_or_remove"
        # What is computed from a sketch is as private as the sketch.
        mechanism: ExactMechanism = (
            ProjectionRelease(
                unit="example", relation=relation, leverage=leverage, columns=release.columns
            )
            if release.kind == "sketched_coefficients"
            else RegressionRelease(
                unit="example",
                relation=relation,
                leverage=leverage,
                columns=release.columns,
                features=release.features,
                # Appended rows may enlarge a residual, so that noise leaves nothing known of it.
                residual=1.0 if sigma else self.residual,
            )
        )
        return Guarantee(mechanism=mechanism, reason="")


@cache
def _paper_sigma(epsilon: float, delta: float, r: int, d: int) -> float:
    return least_squares.sigma(1.0, r, d, epsilon, delta, "paper")
