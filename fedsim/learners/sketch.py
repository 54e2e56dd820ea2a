"""Implements the sketch learner: the Gaussian random projection of all clients' rows."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.learner import Computation, Evaluation, Learner, Problem
from fedsim.learners.closed_form import VALUE, ClosedForm, sketch
from fedsim.types import ReleaseKind, Table, Tensors


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
        """Returns the kind of what clients release: `sketch`."""
        return "sketch"

    def start(self, problem: Problem) -> Computation:
        """Binds the learner to one stack's federation; more than two classes are a FedsimError."""
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
