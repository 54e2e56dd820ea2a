"""Implements what closed-form learners share: one release per client; and the sketch learner.

Each client counts once in the mean: its number of rows would tell whether it holds one more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.guarantee import Release
from fedsim.contracts.learner import Computation, Computed, Evaluation, Learner, Problem, Request
from fedsim.rng import normal
from fedsim.types import (
    FedsimError,
    LocalTraining,
    ReleaseKind,
    ReleaseSpec,
    RowTruth,
    Table,
    Tensors,
)

VALUE = "release"
"""Name of the only tensor that crosses the wire."""

_CHUNK = 4096
"""Number of rows that are multiplied by their part of G at once."""


class OneRelease(Computation):
    """Base of computing one release per client, whose mean replaces the parameters."""

    release: Release

    def apply_update(self, before: Tensor, update: Tensor, training: LocalTraining) -> Tensor:
        """Returns `update`, a client's release; the other arguments are not used."""
        return update

    def finalize(self, mean: Tensors, clients: int) -> Tensors:
        """Returns `mean`, that of the clients' releases, however many `clients` there are."""
        return mean

    def most_examples(self, training: LocalTraining) -> int:
        """Returns 1, a client's weight in the mean, however many rows it holds."""
        return 1

    def plant_probe(self, parameters: Tensors, seed: int) -> Tensors:
        """Returns `parameters` as they are: nothing can be planted in them."""
        return parameters


def counted_once(update: Tensors) -> Computed:
    """Wraps a release, tensors by name, as a client's result that weighs as one example."""
    return Computed(update=update, buffers={}, num_examples=1, truth=None, loss=None)


def all_members(rows: Tensor, scored: Tensor, classes: int = 0) -> RowTruth:
    """Returns the truth of a release in which all `rows` (n, columns), of client 0, took part.

    `scored` (columns,), bool, says which columns are scored. The last `classes` columns encode the
    label; 0 if the last one is data. Tensors are not copied.
    """
    return RowTruth(
        rows=rows,
        members=torch.ones(len(rows), dtype=torch.bool),
        clients=torch.zeros(len(rows), dtype=torch.int64),
        scored=scored,
        classes=classes,
    )


class ClosedForm(OneRelease):
    """Base of closed-form learners' work on tables, in one stack's federation."""

    def __init__(self, problem: Problem, kind: ReleaseKind, columns: int) -> None:
        """Prepares releases of `kind` by a random matrix of `columns` columns (0: by none).

        The problem's data have to be a Table. A target of more than two classes is a FedsimError.
        """
        assert isinstance(problem.dataset, Table)
        self.table = problem.dataset
        if len(self.table.classes or ()) > 2:
            raise FedsimError(
                f"data.source: {self.table.name} has {len(self.table.classes or ())} classes, and "
                f"learner {problem.learner.name} takes two; declare two, or use learner sgd"
            )
        self._stack = problem.stack
        self._learner = problem.learner
        # The last column of a table is the target. A sketch keeps it as a row; coefficients do not.
        features = problem.dataset.train_rows.shape[1] - 1
        self._shape = (features + 1, columns) if kind == "sketch" else (features,)
        self.release = Release(
            kind=kind, row_norm=self.table.row_norm, columns=columns, features=features
        )

    @abstractmethod
    def value(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        """Computes what is released of `rows` (n, d + 1), target last, after `regularize`.

        A sketch is (d + 1, r), of r columns, and regression coefficients are (d,). `rng` is the
        learner's secret stream. A FedsimError says why the rows have no such release.
        """

    def describe(self) -> ReleaseSpec:
        """Describes how the release comes from rows; a FedsimError if no σ is enough."""
        return ReleaseSpec(
            learner=self._learner.name,
            parameters=self._learner.parameters,
            kind=self.release.kind,
            columns=self.release.columns,
            sigma=self._stack.sigma(self.release),
            row_norm=self.table.row_norm,
            names=self.table.columns,
            intercept=self.table.intercept,
            classes=self.table.classes,
        )

    def candidates(self, inputs: Tensor, labels: Tensor) -> RowTruth:
        """Returns the truth of a release of all `inputs` (n, d + 1), which hold the targets."""
        scored = torch.ones(inputs.shape[1], dtype=torch.bool)
        # Before the target stands the intercept, if any: a constant that everybody knows.
        scored[-2] = not self.table.intercept
        return all_members(inputs, scored)

    def check(self, clients: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Refuses, by a FedsimError, rows (n, d + 1) for which the data defense's claim fails."""
        defense = self._stack.data_defense
        if defense and defense.assumes:
            defense.check({client: rows for client, (rows, _) in clients.items()})

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns parameters, float64 zeros named `release` and shaped like one, and no buffers."""
        return {VALUE: torch.zeros(self._shape, dtype=torch.float64)}, {}

    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        """Returns the release of the first batch, with σ I below, drawn from `request.stream`.

        `rng` is not used. It fails as `describe` and `value` do.
        """
        rows = regularize(request.batches[0][0], self._stack.sigma(self.release))
        return counted_once({VALUE: self.value(rows, request.stream)})


def regularize(rows: Tensor, sigma: float) -> Tensor:
    """Returns `rows` D (n, d + 1) with the d + 1 rows of σ I below them; D itself for σ = 0."""
    if sigma == 0:
        return rows
    # D'D becomes D'D + σ² I, as under a ridge penalty of σ².
    return torch.cat([rows, sigma * torch.eye(rows.shape[1], dtype=rows.dtype)])


def sketch(rows: Tensor, columns: int, rng: torch.Generator) -> Tensor:
    """Returns D'G of `rows` D (n, d), as (d, columns); G is standard normal, drawn from `rng`.

    The result of regularized rows [D; σ I] is D'G + σ N with a standard normal N: the noise of the
    random projection mechanism. The part of G that belongs to D is the same whatever σ.
    """
    total = torch.zeros(rows.shape[1], columns, dtype=rows.dtype)
    # torch fills blocks of 16 and an incomplete one otherwise, which would change with σ.
    whole = -(-columns // 16) * 16
    for part in torch.split(rows, _CHUNK):
        matrix = normal((len(part), whole), rng, rows.dtype)
        total += part.T @ matrix[:, :columns]
    return total


@final
class Sketch(Learner):
    """Client i releases D_i'G_i, G_i its own n_i x r standard normal matrix; the server adds up.

    The sum S is D'G, the sketch of all clients' rows (features and target), for the G_i are
    independent; the same alone and behind secure aggregation. SS'/r estimates D'D, so that lengths
    and angles of the columns are kept. The test loss says how far that estimate is from the test
    rows' own matrix, in the Frobenius norm, both scaled to a norm of 1 (there is no model to test).
    No training row is compared with: that would release an exact function of them.
    """

    paper: ClassVar[str] = (
        "Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum "
        "and its Application to Privacy-Preserving Machine Learning, section 5"
    )
    data = Table

    columns: Annotated[int, Field(ge=1, le=1_000_000)]
    """r, the number of columns. Estimates err by 1/sqrt(r); more columns cost more privacy."""

    def payload(self) -> ReleaseKind:
        """Returns `sketch`, the kind of what clients release."""
        return "sketch"

    def start(self, problem: Problem) -> Computation:
        """Binds the learner to a federation; a FedsimError if a target has over two classes."""
        return _Sketching(problem, "sketch", self.columns)


@final
class _Sketching(ClosedForm):
    def value(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        return sketch(rows, self.release.columns, rng)

    def finalize(self, mean: Tensors, clients: int) -> Tensors:
        return {VALUE: mean[VALUE] * clients}

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        rows = self.table.test_rows
        gram, estimate = rows.T @ rows, parameters[VALUE] @ parameters[VALUE].T
        # SS' grows with the columns and with the number of rows, of which neither is an error.
        estimate, gram = (matrix / torch.linalg.matrix_norm(matrix) for matrix in (estimate, gram))
        return Evaluation(loss=float(torch.linalg.matrix_norm(estimate - gram)), accuracy=None)
