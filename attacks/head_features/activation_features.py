"""Every feature of a batch, with sign and norm, from neurons that only some of its images activate.

Under ReLU and planted neurons, whose columns of A are all the same, image i adds one and the same
vector u_i = (s_i x_i, s_i) to the rows (∂L/∂w_j, ∂L/∂b_j) of all neurons that it activates, and
nothing to the others. A row of one image alone is its u_i; ∂L/∂A tells it from those of several,
for over its neurons it must be in proportion to w_j'x + b. Features that are known predict which
neurons they activate; their share is taken off all rows, until all are found.

One image alone: Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic
Encryption, IEEE TIFS 2018. Taking off what is known is the peeling decoder of sparse codes (Luby et
al., Efficient Erasure Correcting Codes, 2001); Shariati and Meybodi (Cascading Gradient Inversion
via LT-Code Inspired Peeling, manuscript, 2026) peel images of a first layer so.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import FeatureAttack, FeatureSolver
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.spectral_features import span

_GROUPS = 400  # groups of equal rows that are examined in one round, the largest first
_SAME_FEATURE = 1 - 1e-6  # cosine from which two features are the same
_ROUNDING = 1e-6  # error of a float32 sum, over the sum of its terms' magnitudes


class Peeling(FeatureSolver):
    """Finds planted neurons whose gradient is of one image, and takes it off others', in rounds."""

    def __init__(self, head: HeadGradient, tolerance: float, consistency: float) -> None:
        """Prepares the first round; AttackFailed without a gradient of planted ReLU neurons.

        `head` is the observed gradient; the others are as in `ActivationFeatures`.
        """
        if not head.config.planted:
            raise AttackFailed(
                "features are told apart by planted neurons: let the server plant some (`head: "
                "{width: ..., planted: ...}`)"
            )
        if head.config.activation != "relu":
            raise AttackFailed(
                f"neurons of {head.config.activation} are active for every image: only relu's tell "
                "which images they see (head.activation: relu)"
            )
        if not head.grad_output[:, head.planted].any() or not head.grad_bias[head.planted].any():
            raise AttackFailed("nothing is left of the planted neurons' gradient")
        # The bias is the weight of an input that is 1: its gradient completes each row.
        rows = torch.cat([head.grad_hidden[head.planted], head.grad_bias[head.planted, None]], 1)
        super().__init__(loss=torch.ones((), device=rows.device))
        self.head, self.tolerance, self.consistency = head, tolerance, consistency
        self.rows = rows.double()
        """(v, d + 1) float64: what no known feature explains of the planted neurons' rows."""
        self.outer = head.grad_output[:, head.planted].double().clone()
        """(K, v) float64: what no known feature explains of ∂L/∂A."""
        self.shares = self.rows.new_zeros(0, rows.shape[1])
        """(n, d + 1) float64: u_i of the n known features."""
        self.stuck = False
        """Whether the last round found no feature."""

    @property
    def finished(self) -> bool:
        """Whether all features are known, or the last round found no neuron of a single image."""
        return self.stuck or len(self.shares) >= self.head.num_images

    @property
    def features(self) -> Tensor:
        """Features (n, d) float64 that are known so far; n may be 0."""
        return _feature(self.shares)

    def improve(self) -> None:
        """Runs a round, one iteration: finds features and takes them off all gradient rows."""
        head = self.head
        weights, bias = head.hidden[head.planted].double(), head.bias[head.planted].double()
        shares, errors = self._single_images(weights, bias)
        self.iteration += 1
        self.stuck = not shares
        if shares:
            share, error = torch.stack(shares), torch.stack(errors)
            inputs = _feature(share) @ weights.T + bias
            slack = _ROUNDING * (_feature(share).abs() @ weights.abs().T + bias.abs())
            # A row is Σ u_i over the images that activate it: what is known is taken off.
            self.rows -= (inputs > 0).double().T @ share
            # Whether the client had such a neuron active is a matter of its rounding.
            self.rows[(inputs.abs() <= slack).any(0)] = 0
            self.outer -= error.T @ torch.relu(inputs)
            self.shares = torch.cat([self.shares, share])
        total = torch.linalg.vector_norm(head.grad_output[:, head.planted].double())
        self.loss = torch.linalg.vector_norm(self.outer) / total

    def _single_images(self, weights: Tensor, bias: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Finds u_i (d + 1,) and D_i (K,) of unknown features, from rows of one image each."""
        shares: list[Tensor] = []
        errors: list[Tensor] = []
        known = list(self.features)
        for members in self._equal_rows():
            share = self.rows[members].mean(0)
            # Without s of u = (s x, s) there is no x.
            if not share[-1]:
                continue
            feature = _feature(share)
            if known:
                cosine = F.cosine_similarity(feature[None], torch.stack(known))
                if bool((cosine > _SAME_FEATURE).any()):
                    continue
            input_ = weights[members] @ feature + bias[members]
            slack = _ROUNDING * (weights[members].abs() @ feature.abs() + bias[members].abs())
            outer = self.outer[:, members]
            # Of one image ∂L/∂A is D_i σ(w_j'x + b_j): least squares for D_i, and what is left
            # tells.
            error = outer @ input_ / input_.square().sum()
            residual = torch.linalg.vector_norm(outer - torch.outer(error, input_))
            explained = residual <= self.consistency * torch.linalg.vector_norm(outer)
            if bool((input_ > -slack).all()) and bool(explained):
                known.append(feature)
                shares.append(share)
                errors.append(error)
        # Chance may offer more single images than there are.
        missing = self.head.num_images - len(self.shares)
        return shares[:missing], errors[:missing]

    def _equal_rows(self) -> list[Tensor]:
        length = torch.linalg.vector_norm(self.rows, dim=1)
        first = not len(self.shares)
        # A row that is explained holds the rounding of what was taken off, not zeros.
        floor = 0.0 if first else 1e-4 * torch.linalg.vector_norm(self.shares, dim=1).median()
        neurons = torch.nonzero(length > floor)[:, 0]
        stream = torch.Generator().manual_seed(0)
        group = torch.zeros(len(neurons), dtype=torch.int64, device=neurons.device)
        for _ in range(2):  # projections of unequal rows meet by chance; two of them hardly ever
            axis = torch.randn(self.rows.shape[1], generator=stream, dtype=torch.float64)
            key = (self.rows @ axis.to(self.rows.device))[neurons] / length[neurons]
            order = torch.argsort(key)
            order = order[torch.argsort(group[order], stable=True)]
            apart = (key[order].diff() > self.tolerance) | (group[order].diff() != 0)
            group[order] = F.pad(apart.cumsum(0), (1, 0))
        # A group of several neurons is no coincidence; a row of its own proves nothing.
        size = torch.bincount(group)
        largest = torch.argsort(size, descending=True, stable=True)[:_GROUPS]
        least = 3 if first else 2  # later rounds have fewer rows to choose from
        return [neurons[group == g] for g in largest.tolist() if size[g] >= least]

    def reconstruction(self) -> Reconstruction:
        """Returns the known features (n, d), then an orthonormal basis of the rest of the span.

        The loss is the relative residual of the output weights' gradient at planted neurons.
        """
        features, head = self.features, self.head
        missing = head.rank - len(features)
        if missing > 0:
            basis, _ = span(head.rows, head.rank)
            empty = basis.new_zeros(basis.shape[1], 0)
            axes = torch.linalg.qr(features.T)[0] if len(features) else empty
            outside = basis - (basis @ axes) @ axes.T
            rest = torch.linalg.svd(outside, full_matrices=False)[2][:missing]
            features = torch.cat([features, rest])
        return Reconstruction(
            features=features.float(), loss=float(self.loss), iterations=self.iteration
        )


@final
class ActivationFeatures(FeatureAttack[Peeling]):
    """Finds neurons that one image activates alone, takes it off the others' rows, and repeats.

    Rows have to be exact: without noise, pruning or quantization, and of one gradient or few steps.
    A basis of the rest of the span stands for features that are not found.
    """

    paper: ClassVar[str] = (
        "Phong et al., IEEE TIFS 2018 (a row of one image alone), and peeling (Luby et al., 2001; "
        "of images Shariati and Meybodi, 2026)"
    )

    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Relative difference of rows that count as equal."""
    consistency: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Relative error of ∂L/∂A, the output weights' gradient, at which a row still counts as one
    image's."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Peeling:
        """Prepares a round; AttackFailed without planted ReLU neurons. See `Attack.init`."""
        return Peeling(HeadGradient.read(observation), self.tolerance, self.consistency)


def _feature(share: Tensor) -> Tensor:
    return share[..., :-1] / share[..., -1:]
