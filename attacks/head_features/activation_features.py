"""Every feature of a batch, with sign and norm, from neurons that only some of its images activate.

Under ReLU and planted neurons, whose columns of A are all the same, image i adds one and the same
vector u_i = (s_i x_i, s_i) to the rows (∂L/∂w_j, ∂L/∂b_j) of all neurons that it activates, and
nothing to the others (`head_gradient`). So neurons activated by the same images have the same row,
and a row of one image alone is its u_i, whose entries divided by the last are x_i. What tells such
a row from those of several images is ∂L/∂A: over its neurons it must be in proportion to w_j'x + b.
Features that are known predict which neurons they activate; their share is taken off all rows, and
rows of two unknown images become rows of one. That is repeated until all are found.

One image alone: Fowl et al., Robbing the Fed, ICLR 2022. Taking off what is known is the peeling
decoder of sparse codes (Luby et al., Efficient Erasure Correcting Codes, 2001).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.spectral_features import span

_GROUPS = 400
"""Groups of equal rows that are looked at in one round, the largest first."""
_SAME_FEATURE = 1 - 1e-6
_ROUNDING = 1e-6
"""What a float32 sum may be off by, over the sum of its terms' magnitudes."""


@dataclass(kw_only=True)
class Peeling(AttackState):
    """What is known so far of n features."""

    seen: HeadGradient
    rows: Tensor
    """(v, d + 1) float64: what no known feature explains of the planted neurons' rows."""
    outer: Tensor
    """(K, v) float64: the same of ∂L/∂A."""
    shares: Tensor
    """(n, d + 1) float64: u_i of the known features."""
    errors: Tensor
    """(n, K) float64: D_ki of the known features."""
    stuck: bool = False


@final
class ActivationFeatures(Attack[Peeling]):
    """Finds neurons that one image activates alone, takes it off the others' rows, and repeats.

    It needs exact rows: without noise, pruning or quantization, and one gradient or few steps.
    Features that it cannot find are filled up with the rest of the features' span.
    """

    paper: ClassVar[str] = "Fowl et al., Robbing the Fed, ICLR 2022 (one image alone), and peeling"

    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Relative difference of rows that count as equal."""
    consistency: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Relative error of ∂L/∂A at which a row still counts as one image's."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Peeling:
        """Nothing is known.

        Raises:
            AttackFailed: there is no two-layer head, none of its neurons are planted, or its
                activation is not ReLU.
        """
        return start(HeadGradient.of(observation))

    def step(self, state: Peeling) -> Peeling:
        """Find single images' rows, and take them off the others."""
        return peel(state, self.tolerance, self.consistency)

    def terminate(self, state: Peeling) -> bool:
        """All are found, or no row is a single image's."""
        return state.stuck or len(state.shares) >= state.seen.num_images

    def postprocess(self, state: Peeling) -> Reconstruction:
        """The features. The loss is the share of ∂L/∂A that they do not explain."""
        return Reconstruction(
            features=filled_up(state).float(), loss=float(state.loss), iterations=state.iteration
        )


def start(seen: HeadGradient) -> Peeling:
    """The state in which nothing is known.

    Raises:
        AttackFailed: as `ActivationFeatures.init`, or nothing is left of the gradient.
    """
    if not seen.config.planted:
        raise AttackFailed(
            "features are told apart by planted neurons: let the server plant some (`head: {width: "
            "..., planted: ...}`)"
        )
    if seen.config.activation != "relu":
        raise AttackFailed(
            f"neurons of {seen.config.activation} are active for every image: only relu's tell "
            "which images they see (head.activation: relu)"
        )
    if not seen.grad_output[:, seen.server].any() or not seen.grad_bias[seen.server].any():
        raise AttackFailed("nothing is left of the planted neurons' gradient")
    rows = torch.cat([seen.grad_hidden[seen.server], seen.grad_bias[seen.server, None]], 1)
    outer = seen.grad_output[:, seen.server].double().clone()
    return Peeling(
        seen=seen,
        rows=rows.double(),
        outer=outer,
        shares=outer.new_zeros(0, rows.shape[1]),
        errors=outer.new_zeros(0, len(outer)),
        loss=torch.ones((), device=rows.device),
    )


def peel(state: Peeling, tolerance: float, consistency: float) -> Peeling:
    """One round: single images' rows join what is known, and leave the other rows."""
    seen = state.seen
    weights, bias = seen.hidden[seen.server].double(), seen.bias[seen.server].double()
    found: list[tuple[Tensor, Tensor]] = []
    known = list(features(state.shares))
    for members in _equal_rows(state, tolerance):
        share = state.rows[members].mean(0)
        if not share[-1]:
            continue
        feature = features(share)
        if known and _is_among(feature, known):
            continue
        input_ = weights[members] @ feature + bias[members]
        slack = _ROUNDING * (weights[members].abs() @ feature.abs() + bias[members].abs())
        outer = state.outer[:, members]
        error = outer @ input_ / input_.square().sum()
        left = torch.linalg.vector_norm(outer - torch.outer(error, input_))
        explained = left <= consistency * torch.linalg.vector_norm(outer)
        if bool((input_ > -slack).all()) and bool(explained):
            known.append(feature)
            found.append((share, error))
    found = found[: seen.num_images - len(state.shares)]
    state.iteration += 1
    state.stuck = not found
    if found:
        shares, errors = (torch.stack(part) for part in zip(*found, strict=True))
        inputs = features(shares) @ weights.T + bias
        slack = _ROUNDING * (features(shares).abs() @ weights.abs().T + bias.abs())
        state.rows -= (inputs > 0).double().T @ shares
        # Whether the client had such a neuron active is a matter of its rounding.
        state.rows[(inputs.abs() <= slack).any(0)] = 0
        state.outer -= errors.T @ torch.relu(inputs)
        state.shares = torch.cat([state.shares, shares])
        state.errors = torch.cat([state.errors, errors])
    total = torch.linalg.vector_norm(seen.grad_output[:, seen.server].double())
    state.loss = torch.linalg.vector_norm(state.outer) / total
    return state


def features(shares: Tensor) -> Tensor:
    """x from u = (s x, s), (..., d + 1) -> (..., d)."""
    return shares[..., :-1] / shares[..., -1:]


def filled_up(state: Peeling) -> Tensor:
    """(N, d) float64: the known features, then the rest of the span of all."""
    known, seen = features(state.shares), state.seen
    missing = seen.rank - len(known)
    if missing <= 0:
        return known
    basis, _ = span(seen.rows, seen.rank)
    axes = torch.linalg.qr(known.T)[0] if len(known) else basis.new_zeros(basis.shape[1], 0)
    outside = basis - (basis @ axes) @ axes.T
    rest = torch.linalg.svd(outside, full_matrices=False)[2][:missing]
    return torch.cat([known, rest])


def _equal_rows(state: Peeling, tolerance: float) -> list[Tensor]:
    """Groups of neurons whose rows are equal, the largest first."""
    length = torch.linalg.vector_norm(state.rows, dim=1)
    first = not len(state.shares)
    # A row that is explained holds the rounding of what was taken off, not zeros.
    floor = 0.0 if first else 1e-4 * torch.linalg.vector_norm(state.shares, dim=1).median()
    neurons = torch.nonzero(length > floor)[:, 0]
    stream = torch.Generator().manual_seed(0)
    group = torch.zeros(len(neurons), dtype=torch.int64, device=neurons.device)
    for _ in range(2):  # projections of unequal rows meet by chance; two of them hardly ever
        axis = torch.randn(state.rows.shape[1], generator=stream, dtype=torch.float64)
        key = (state.rows @ axis.to(state.rows.device))[neurons] / length[neurons]
        order = torch.argsort(key)
        order = order[torch.argsort(group[order], stable=True)]
        apart = (key[order].diff() > tolerance) | (group[order].diff() != 0)
        group[order] = F.pad(apart.cumsum(0), (1, 0))
    size = torch.bincount(group)
    largest = torch.argsort(size, descending=True, stable=True)[:_GROUPS]
    least = 3 if first else 2  # later rounds have fewer rows to choose from
    return [neurons[group == g] for g in largest.tolist() if size[g] >= least]


def _is_among(feature: Tensor, known: list[Tensor]) -> bool:
    cosine = F.cosine_similarity(feature[None], torch.stack(known))
    return bool((cosine > _SAME_FEATURE).any())
