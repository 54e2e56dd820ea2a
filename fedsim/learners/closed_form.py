"""What every closed-form learner does: one release per client from its rows, and their plain mean.

The release replaces the global parameters instead of moving them, and each client counts once in
the mean: a client's number of rows would tell whether it holds one more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from fedsim.contracts.guarantee import Release
from fedsim.contracts.learner import Computation, Computed, Problem, Request
from fedsim.rng import normal
from fedsim.types import LocalTraining, ReleaseKind, ReleaseSpec, RowTruth, Table, Tensors

VALUE = "release"
"""Name of the only tensor that crosses the wire."""

_CHUNK = 4096
"""Rows that are multiplied by their part of G at once."""


class ClosedForm(Computation):
    """A closed-form learner at work on one stack's federation."""

    release: Release

    def __init__(self, problem: Problem, kind: ReleaseKind, columns: int) -> None:
        """`columns` is r, 0 where no random matrix is drawn."""
        assert isinstance(problem.dataset, Table)
        self.table = problem.dataset
        self._stack = problem.stack
        self._learner = problem.learner
        features = problem.dataset.train_rows.shape[1] - 1
        self._shape = (features + 1, columns) if kind == "sketch" else (features,)
        self.release = Release(
            kind=kind, row_norm=self.table.row_norm, columns=columns, features=features
        )

    @abstractmethod
    def value(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        """What is released of (n, d + 1) rows; `rng` is the client's own, kept from everybody."""

    def describe(self) -> ReleaseSpec:
        """How the release comes from rows. (Not an attribute, since σ may not exist.)"""
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
        """The rows of the table."""
        scored = torch.ones(inputs.shape[1], dtype=torch.bool)
        scored[-2] = not self.table.intercept
        return RowTruth(
            rows=inputs,
            members=torch.ones(len(inputs), dtype=torch.bool),
            clients=torch.zeros(len(inputs), dtype=torch.int64),
            scored=scored,
        )

    def check(self, clients: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """By the defense of rows."""
        defense = self._stack.data_defense
        if defense and defense.assumes:
            defense.check({client: rows for client, (rows, _) in clients.items()})

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Zeros: there is no model before the first release."""
        return {VALUE: torch.zeros(self._shape, dtype=torch.float64)}, {}

    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        """The release of the client's rows, regularized as the stack says."""
        rows = regularized(request.batches[0][0], self._stack.sigma(self.release))
        return Computed(
            update={VALUE: self.value(rows, request.stream)},
            buffers={},
            num_examples=1,
            truth=None,
            loss=None,
        )

    def apply_update(self, before: Tensor, update: Tensor, training: LocalTraining) -> Tensor:
        """The release itself."""
        return update

    def plant_probe(self, parameters: Tensors, seed: int) -> Tensors:
        """The parameters: nothing can be planted in them."""
        return parameters


def regularized(rows: Tensor, sigma: float) -> Tensor:
    """[D; σ I]: (n, d + 1) rows and as many further ones as there are columns; D itself for σ 0."""
    if sigma == 0:
        return rows
    return torch.cat([rows, sigma * torch.eye(rows.shape[1], dtype=rows.dtype)])


def sketch(rows: Tensor, columns: int, rng: torch.Generator) -> Tensor:
    """D'G: (n, d) rows -> (d, columns), the entries of G being independent and standard normal.

    Of the regularized rows [D; σ I] it is D'G + σ N, with N as independent: the noise of the random
    projection mechanism. The part of G that belongs to D is the same whatever σ.
    """
    total = torch.zeros(rows.shape[1], columns, dtype=rows.dtype)
    # torch fills blocks of 16 and an incomplete one otherwise, which would change with σ.
    whole = -(-columns // 16) * 16
    for part in torch.split(rows, _CHUNK):
        matrix = normal((len(part), whole), rng, rows.dtype)
        total += part.T @ matrix[:, :columns]
    return total
