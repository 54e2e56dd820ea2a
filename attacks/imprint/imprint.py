"""Images out of an imprint module's gradient, by one division each.

Fowl, Geiping, Czaja, Goldblum and Goldstein, Robbing the Fed: Directly Obtaining Private Data in
Federated Learning with Modified Models, ICLR 2022, equation 5. The module is in
`fedsim.models.imprint`, with what its gradient is made of.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import denormalize
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack

_WEIGHT, _BIAS = "imprint.hidden.weight", "imprint.hidden.bias"
_ROUNDING = 1e-10  # share of the largest row's energy below which a jump is rounding
_CLEAR = 2.0  # energy of a jump over that of a jump by noise, from which it is an image's


@final
class ImprintAttack(DirectAttack):
    """Reads the images off the imprint module that the server has put in front of the model.

    The paper divides the differences of adjacent rows. Rows between two images' bins are equal, but
    for noise: here they are segmented (least squares), and the differences of the pieces' means are
    divided. Several local steps move the weights, so that rows drift within a piece: there the two
    rows where pieces meet are compared, as in the paper.

    Without noise, images that are alone in their bin are exact, also of a clipped update or several
    clients. Others come out as their mean, weighted by their part in the gradient.
    """

    paper: ClassVar[str] = "Fowl et al., Robbing the Fed, ICLR 2022, equation (5)"

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns images (N, C, H, W), largest gradients first, and repeats if too few stand out.

        An AttackFailed says that the model has no imprint module, or that no image stands out.
        """
        if _WEIGHT not in observation.update:
            raise AttackFailed(
                "the model has no imprint module to read: set model.imprint, as {bins: 128}"
            )
        weight, bias = (observation.update[name].double() for name in (_WEIGHT, _BIAS))
        rows = torch.cat([weight, bias[:, None]], 1)
        if not rows.any():
            raise AttackFailed(
                "nothing is left of the imprint module's gradient: lower model.imprint.scale, or "
                "remove less of the update"
            )
        segmentation = _segment(rows, min(observation.num_images, len(rows)))
        jumps = _clear_jumps(rows, segmentation, drifting=observation.training.steps > 1)
        if not len(jumps):
            raise AttackFailed(
                "no image stands out of the noise in the imprint module's gradient: lower "
                "model.imprint.scale"
            )
        # Largest first, so that repetitions are of the images with the largest gradients.
        jumps = jumps[jumps[:, -1].abs().argsort(descending=True)]
        jumps = jumps.repeat(math.ceil(observation.num_images / len(jumps)), 1)
        jumps = jumps[: observation.num_images]
        # Equation 5: differences of the weights' rows over those of the biases.
        images = (jumps[:, :-1] / jumps[:, -1:]).view(-1, *observation.model.input_shape)
        pixels = denormalize(images, observation.model).clamp(0, 1).float()
        loss = float(segmentation.residual.clamp_min(0) / rows.square().sum())
        return Reconstruction(images=pixels, loss=loss, iterations=0)


def _clear_jumps(rows: Tensor, segmentation: _Segmentation, drifting: bool) -> Tensor:
    """Computes differences of consecutive pieces of `rows` (k, m), without noise and rounding."""
    if drifting:
        # Rows drift within a piece: only the two that meet at its end are compared.
        jumps = -torch.cat([rows, torch.zeros_like(rows[:1])]).diff(dim=0)
        jumps = jumps[torch.tensor(segmentation.ends, device=rows.device) - 1]
        lengths = rows.new_ones(len(jumps))
    else:
        jumps = -segmentation.means(rows).diff(dim=0)
        lengths = torch.tensor([0, *segmentation.ends], device=rows.device).diff().to(rows.dtype)
    # Squared distance from its piece's mean that noise gives a row, by the degrees of freedom.
    spread = segmentation.residual / max(1, len(rows) - len(jumps))
    # The variance of a mean; the zero after the last piece has none.
    noise = 1 / lengths + torch.cat([1 / lengths[1:], lengths.new_zeros(1)])
    least = (_CLEAR * spread * noise).clamp_min(_ROUNDING * rows.square().sum(1).max())
    return jumps[(jumps.square().sum(1) > least) & (jumps[:, -1] != 0)]


class _Segmentation(NamedTuple):
    """Pieces of rows that are taken to be equal, followed by one that is taken to be zero."""

    ends: list[int]
    """One past the last row of each piece, ascending. From the last one on, rows are zero."""
    residual: Tensor
    """Squared distance of the rows from their pieces' means, and of the last ones from zero."""

    def means(self, rows: Tensor) -> Tensor:
        starts = [0, *self.ends]
        pieces = [rows[a:b].mean(0) for a, b in zip(starts, self.ends, strict=False)]
        return torch.stack([*pieces, torch.zeros_like(rows[0])])


def _segment(rows: Tensor, pieces: int) -> _Segmentation:
    """Finds the segmentation of `rows` (k, m) into `pieces` <= k with the least residual."""
    # Dynamic programming over the end of the last piece (Bellman, On the approximation of curves by
    # line segments using dynamic programming, CACM 1961): k² pieces operations.
    zero = torch.zeros_like(rows[:1])
    sums = torch.cat([zero, rows.cumsum(0)])
    squares = torch.cat([zero[:, 0], rows.square().sum(1).cumsum(0)])
    place = torch.arange(len(sums), device=rows.device)
    length = place[None, :] - place[:, None]
    within = torch.cdist(sums, sums, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Σ |x - mean|² = Σ |x|² - |Σ x|² / n, of every piece at once by prefix sums.
    cost = squares[None, :] - squares[:, None] - within / length.clamp_min(1)
    cost.masked_fill_(length <= 0, torch.inf)  # (start, end) of one piece
    best, came = cost[0], []
    for _ in range(pieces - 1):
        best, start = (best[:, None] + cost).min(0)
        came.append(start)
    # The rows after the last piece are taken for zero, at the cost of their energy.
    total = best + squares[-1] - squares
    ends = [int(total.argmin())]
    # Back from the last piece: each start is the end of the piece before.
    for start in reversed(came):
        ends.append(int(start[ends[-1]]))
    return _Segmentation(ends[::-1], total.min())
