"""Learns by least squares: linear regression from sketches or from clients' coefficients."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.learner import Computation, Evaluation, Learner, Problem
from fedsim.learners.closed_form import VALUE, ClosedForm, sketch
from fedsim.rng import normal
from fedsim.types import FedsimError, ReleaseKind, Table, Tensors
from fedsim.words import number_of

RegressionMethod = Literal["sketch", "als", "ls", "ols"]

_KINDS: dict[RegressionMethod, ReleaseKind] = {
    "sketch": "sketch",
    "als": "sketched_coefficients",
    "ls": "normal_coefficients",
    "ols": "coefficients",
}


@final
class LeastSquares(Learner):
    """Regresses the target b on the features B: the x of least ||Bx - b||.

    `sketch`: the clients release sketches [B, b]'G as learner sketch does, and the server solves on
    their sum. `als`: each client solves on a sketch of its own rows (Algorithm 1) and releases the
    coefficients. `ls`: it releases a draw of N(x, ||e||² (B'B)^-1 / r), which `als` tends to for
    large r; e are the residuals. `ols`: it releases x itself. The server averages
    coefficients over the clients. The test loss is the mean squared error. For a target of two
    classes, the accuracy is the share of right signs.
    """

    paper: ClassVar[str] = (
        "Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum "
        "and its Application to Privacy-Preserving Machine Learning, section 6 (Algorithm 1, "
        "Lemma 1)"
    )
    data = Table

    method: RegressionMethod = "sketch"
    columns: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """r, the number of columns of a sketch; `ols` has none."""

    @model_validator(mode="after")
    def _columns_fit(self) -> LeastSquares:
        if (self.columns is None) != (self.method == "ols"):
            raise ValueError(
                "least_squares takes columns with the methods sketch, als and ls, and none with ols"
            )
        return self

    def payload(self) -> ReleaseKind:
        """Returns the kind of release of the `method`: `coefficients` of `ols`, for example."""
        return _KINDS[self.method]

    def start(self, problem: Problem) -> Computation:
        """Binds the learner; a FedsimError for over two classes, or a sketch of <= d columns."""
        return _LinearRegression(problem, self.method, self.columns or 0)


@final
class _LinearRegression(ClosedForm):
    def __init__(self, problem: Problem, method: RegressionMethod, columns: int) -> None:
        super().__init__(problem, _KINDS[method], columns)
        self._method = method
        features = self.release.features
        # r columns are r equations for d unknowns, and with no more than d there is no residual.
        if method in ("sketch", "als") and columns <= features:
            raise FedsimError(
                f"a sketch of {number_of(columns, 'column')} does not determine "
                f"{number_of(features, 'coefficient')} and a residual; use columns of at least "
                f"{features + 1}"
            )

    def value(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        if self._method == "sketch":
            return sketch(rows, self.release.columns, rng)
        if self._method == "als":
            # Transposed, the sketch is r rows: x minimizes ||G'(Bx - b)|| (Algorithm 1).
            return solve(sketch(rows, self.release.columns, rng).T)
        if self._method == "ls":
            return normal_solution(rows, self.release.columns, rng)
        return solve(rows)

    def finalize(self, mean: Tensors, clients: int) -> Tensors:
        return {VALUE: mean[VALUE] * clients} if self._method == "sketch" else mean

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        value = parameters[VALUE]
        coefficients = solve(value.T) if self._method == "sketch" else value
        rows = self.table.test_rows
        predicted, target = rows[:, :-1] @ coefficients, rows[:, -1]
        accuracy = None
        if self.table.classes:
            accuracy = float(((predicted > 0) == (target > 0)).double().mean())
        return Evaluation(loss=float((predicted - target).square().mean()), accuracy=accuracy)


def solve(rows: Tensor) -> Tensor:
    """Computes the shortest x that minimizes ||Bx - b||, (d,), for `rows` [B, b] (n, d + 1)."""
    # Of several solutions gelsd gives the shortest; gels needs full rank.
    solution: Tensor = torch.linalg.lstsq(rows[:, :-1], rows[:, -1:], driver="gelsd").solution
    return solution.squeeze(1)


def normal_solution(rows: Tensor, columns: int, rng: torch.Generator) -> Tensor:
    """Draws (d,) from N(x, ||e||² (B'B)^-1 / r), the limit of least squares on sketches.

    `rows` is [B, b] (n, d + 1) with the solution x and residuals e; `columns` >= 1 is r, that of
    the sketch. A FedsimError says that B has not full column rank.
    """
    features, target = rows[:, :-1], rows[:, -1]
    best = solve(rows)
    residual = torch.linalg.vector_norm(features @ best - target)
    factor, failed = torch.linalg.cholesky_ex(features.T @ features)
    if int(failed):
        raise FedsimError(
            "least_squares: a client's features are linearly dependent, so that method ls has no "
            "distribution to draw from; put the defense least_squares into the stack, drop "
            "columns, or give clients more rows"
        )
    draw = normal((len(best), 1), rng, rows.dtype)
    # With B'B = LL' and z ~ N(0, I), the vector L'⁻¹ z has covariance (B'B)⁻¹.
    spread = torch.linalg.solve_triangular(factor.T, draw, upper=True).squeeze(1)
    drawn: Tensor = best + residual / columns**0.5 * spread
    return drawn
