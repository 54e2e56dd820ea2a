"""The random projection mechanism: a sketch with just enough noise for (ε, δ)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import DataDefense
from fedsim.contracts.guarantee import Guarantee, Release
from fedsim.privacy import baselines
from fedsim.privacy.mechanisms import least_squares, projection
from fedsim.privacy.mechanisms.projection import ProjectionRelease, bound, lowering
from fedsim.types import FedsimError
from fedsim.words import number_of


@final
class RandomProjection(DataDefense):
    """Makes a sketch D'G (ε, δ)-private by adding σ times a standard normal matrix.

    D are the rows [features, target], and G is a standard normal matrix. G hides a row the better,
    the less the row's leverage is. σ lowers the leverage of every row, of norm l at most, to the
    largest that is still private, s̄. The bound l is the data source's `row_norm`, and the number of
    G's columns is the learner's `columns`. One row is hidden, against its absence.

    `shared_among` N clients each add σ / sqrt(N): put `aggregate` behind it, so that the server
    sees only their sum, which holds the whole σ. The claim holds against a server with which no
    client colludes. If fewer than N clients answer, nothing is combined.
    """

    paper: ClassVar[str] = (
        "Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum "
        "and its Application to Privacy-Preserving Machine Learning, Figure 3 and Figure 12"
    )

    epsilon: Annotated[float, Field(gt=0, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    calibration: Literal["tight", "paper", "sheffet", "mutual_information"] = "tight"
    """`tight`: σ = l sqrt(1/s̄ - 1), which is least. `paper`: σ = l sqrt(1/s̄), more than needed.
    The other two are older and need far more: `sheffet` (ALT 2019) by the least singular value,
    whatever the leverage; `mutual_information` by what a row shares with the release, after
    Showkatbakhsh, Karakus and Diggavi (ISIT 2018)."""
    shared_among: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of clients that share the noise."""
    leverage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest leverage of a row in any database that is to be hidden among. Below 1 the claim
    is *relative*: it holds among those databases alone (of the union of the clients, if they share
    the noise), and whoever computes it from the data reveals something by it."""

    @property
    def least_clients(self) -> int:
        """Number of clients whose sketches have to be combined: `shared_among`."""
        return self.shared_among

    @property
    def assumes(self) -> bool:
        """Whether a leverage below 1 is declared. See `DataDefense.assumes`."""
        return self.leverage < 1

    def check(self, clients: Mapping[int, Tensor]) -> None:
        """Refuses, by a FedsimError, rows (n, d + 1) of more leverage than is declared.

        If clients share the noise, a row's leverage is that among the rows of all of them.
        """
        if self.shared_among > 1:
            clients = {-1: torch.cat(list(clients.values()))}
        for client, rows in clients.items():
            of = "all clients" if client < 0 else f"client {client}"
            require("random_projection.leverage", self.leverage, largest_leverage(rows), rows, of)

    def sigma(self, release: Release) -> float:
        """Returns one client's σ, in units of rows, or 0. See `DataDefense.sigma`.

        A FedsimError refuses releases that are no sketches, and what no σ makes private.
        """
        return self._whole(release) / math.sqrt(self.shared_among)

    def guarantee(self, release: Release) -> Guarantee:
        """Returns the mechanism of a client's noise, `pooled` that of all; errors as `sigma`."""
        # Of a single client's rows nothing is known if the leverage is that in the union.
        own = 1.0 if self.shared_among > 1 else self.leverage
        alone = self._make_mechanism(release, self.sigma(release), own)
        together = self._make_mechanism(release, self._whole(release), self.leverage)
        return Guarantee(
            mechanism=alone, pooled=together if self.shared_among > 1 else None, reason=""
        )

    def _whole(self, release: Release) -> float:
        if release.kind != "sketch":
            raise FedsimError(
                "random_projection protects a sketch, and the learner releases coefficients; use "
                "the defense least_squares, or a method that releases sketches"
            )
        norm, columns = release.row_norm, release.columns
        if self.calibration == "sheffet":
            return baselines.sheffet_sigma(norm, columns, self.epsilon, self.delta)
        if self.calibration == "mutual_information":
            allowed = baselines.mutual_information_leverage(self.delta, columns)
            return lowering(allowed, norm, self.leverage)
        allowed = max_leverage(self.epsilon, self.delta, columns, None)
        least = lowering(allowed, norm, self.leverage)
        # Rows of no more leverage than is allowed need no
        # noise, whichever calibration is asked for.
        if self.calibration == "tight" or least == 0:
            return least
        return norm * math.sqrt(1 / allowed)

    def _make_mechanism(self, release: Release, sigma: float, leverage: float) -> ProjectionRelease:
        return ProjectionRelease(
            unit="example",
            relation="add_or_remove" if leverage == 1 else "relative",
            leverage=bound(sigma, release.row_norm, leverage),
            columns=release.columns,
            without_noise=leverage,
        )


_ROUNDING = 1e-9  # relative error of a measured leverage; it changes a claim by no more than that


def largest_leverage(rows: Tensor) -> float:
    """Returns the largest leverage v'(D'D)^+ v of a row v of D = `rows` (n, d); 0 without rows."""
    if not len(rows):
        return 0.0
    left, lengths, _ = torch.linalg.svd(rows, full_matrices=False)
    kept = lengths > lengths.max() * max(rows.shape) * torch.finfo(rows.dtype).eps
    # With D = U S V', v'(D'D)^+ v is the squared length of the row's part of U.
    return float(left[:, kept].square().sum(1).max())


def largest_residual(rows: Tensor) -> float:
    """Returns the largest share of a row in the squared residuals of least squares; 0 without rows.

    `rows` [B, b] are (n, d + 1), and b is fitted by B. The share is 1 if all residuals are lost in
    rounding.
    """
    if not len(rows):
        return 0.0
    features, target = rows[:, :-1], rows[:, -1:]
    best = torch.linalg.lstsq(features, target, driver="gelsd").solution
    squares = (target - features @ best).square()
    if float(squares.sum()) <= 1e-20 * float(target.square().sum()):
        return 1.0
    return float(squares.max() / squares.sum())


def require(key: str, declared: float, found: float, rows: Tensor, of: str) -> None:
    """Refuses, by a FedsimError, rows that stand out more than is declared.

    Args:
        key: parameter that declares it, such as `least_squares.leverage`, for the message.
        declared: the largest leverage, or share of residuals, that any row may have.
        found: the largest that one of these rows has.
        rows: (n, d), of which the message tells how many they are.
        of: whose rows they are, for the message.
    """
    if found > declared * (1 + _ROUNDING):
        raise FedsimError(
            f"{key}: expected no row above {declared:g}, got {found:.6g} among the "
            f"{number_of(len(rows), 'row')} of {of}, so that the claim would not hold; declare "
            "what holds of every database to hide among, or leave it out for a claim that holds of "
            "any"
        )


@cache
def max_leverage(epsilon: float, delta: float, r: int, d: int | None) -> float:
    """Returns the largest leverage, in [0, 1], at which a release is (ε, δ)-private.

    A FedsimError refuses other arguments, and coefficients that need a leverage below 1e-50.

    Args:
        epsilon: above 0.
        delta: in (0, 1).
        r: columns of the release, at least 1.
        d: features of coefficients by M_LS (see `LeastSquaresMechanism`); None: it is a sketch.
    """
    if d is None:
        return float(projection.max_leverage(epsilon, delta, r))
    return least_squares.max_leverage(epsilon, delta, r, d)
