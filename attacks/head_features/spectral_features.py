"""The span of a batch's features: every row of the head's ∂L/∂W is a combination of them."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.head_features._head_gradient import HeadGradient

_CHUNK = 4096  # rows that are brought to float64 at once


@final
class SpectralFeatures(DirectAttack):
    """Finds the span of the features: the leading right-singular vectors of ∂L/∂W, hidden weights.

    It returns an orthonormal basis: the span is what is recovered, not single features.
    """

    paper: ClassVar[str] = (
        "Row space of a linear layer's gradient; span metric of Liu et al., Data Reconstruction "
        "Attacks and Defenses, section 4.1"
    )

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns an orthonormal basis (n, d) as features, n the lesser of batch size and d.

        The loss is the share of the energy of ∂L/∂W, the hidden weights' gradient, outside the
        span. An AttackFailed says that ∂L/∂W is 0, or that the model has no two-layer head.
        """
        head = HeadGradient.read(observation)
        if not head.grad_hidden.any():
            raise AttackFailed("nothing is left of ∂L/∂W, whose rows the span is read off")
        basis, outside = span(head.rows, head.rank)
        return Reconstruction(features=basis.float(), loss=float(outside), iterations=0)


def span(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the leading right-singular vectors (rank, d) of `rows` (m, d), the strongest first.

    `rank` is at most d. The second part is the share of the rows' energy outside of their span
    (0-d), from 0 to 1. Both are float64.
    """
    # As eigenvectors of rows' rows they cost m d², and are exact down to 1e-8 of the strongest.
    gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for chunk in torch.split(rows, _CHUNK):
        chunk = chunk.double()
        # In chunks, so that no float64 copy of all rows is held.
        gram.addmm_(chunk.T, chunk)
    values, vectors = eigenvectors(gram)
    outside = values[: len(values) - rank].clamp(min=0).sum() / values.sum().clamp(min=1e-300)
    return vectors.flip(1)[:, :rank].T.contiguous(), outside


def eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ascending eigenvalues (n,) and, as columns, eigenvectors of a symmetric `matrix`."""
    # LAPACK's divide and conquer may give up on equal eigenvalues, as of the few rows that heavy
    # pruning leaves; QR iteration does not.
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        from scipy.linalg import eigh

        solution = eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(part).to(matrix) for part in solution)
    return values, vectors
