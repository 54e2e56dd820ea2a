"""How an update answers to a change of its images: what any attack by matching has to go by.

The update is a function U of all images that it is of. Attacks start at a guess and follow the
slope of |U(images) - update|². Here the way from guess to truth is known, so that a few gradients
tell how much of it U shows (`spectrum`), and whether the slope leads along it (`slope_share`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.models.base import Classifier
from fedsim.models.local import gradient, local_update, loss_function
from fedsim.types import LocalTraining, Tensors

DISTANCES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of the way from the truth to the guess at which the slope is looked at."""
LANCZOS_STEPS = 12
_STEP = 1e-6
"""Of a difference quotient in float64, in units of the way from guess to truth: so short that
hardly any unit of a network switches within it."""


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Eigenvalues of J'J, J the derivative of the update by images, as one direction sees them."""

    eigenvalues: Tensor
    """(k,) >= 0, in squared units of the update per squared unit of normalized pixels."""
    weights: Tensor
    """(k,) shares of the direction's energy, of sum 1."""
    square: float
    """Squared length of the direction."""


class UpdateMap:
    """U: normalized images (N, C, H, W) -> the mean update of all clients, flat, in float64."""

    def __init__(
        self,
        model: Classifier,
        parameters: Tensors,
        buffers: Tensors,
        training: LocalTraining,
        clients: int,
    ) -> None:
        """Prepares the function.

        Args:
            model: Any weights of its own; it is set to float64.
            parameters: That the clients start from.
            buffers: That they start from.
            training: Of each client.
            clients: Whose updates the observed one is the mean of; each has its share of the
                images.
        """
        self._parameters = {n: t.detach().double() for n, t in parameters.items()}
        state = {n: t.double() if t.is_floating_point() else t for n, t in buffers.items()}
        # Masks of dropout are nobody's to know: their mean is computed.
        self._training = replace(training, dropout=0.0)
        self._loss = loss_function(model.double(), state, self._training)
        self._clients = clients
        self.names = tuple(self._parameters)

    def tensors(self, images: Tensor, labels: Tensor, *, differentiable: bool = False) -> Tensors:
        """Returns the update by the names of its tensors."""

        def direction(parameters: Tensors, x: Tensor, y: Tensor) -> Tensors:
            found = gradient(self._loss, parameters, x, y, create_graph=differentiable)
            return found if differentiable else {n: g.detach() for n, g in found.items()}

        updates = [
            local_update(direction, self._parameters, self._batches(x, y), self._training)
            for x, y in zip(images.chunk(self._clients), labels.chunk(self._clients), strict=True)
        ]
        return {n: torch.stack([update[n] for update in updates]).mean(0) for n in self.names}

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the update as one vector (m,)."""
        return flat(self.tensors(images, labels), self.names)

    def pull_back(self, images: Tensor, labels: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Returns J'v at `images`, shaped like these, for each v (m,) of `vectors`."""
        at = images.detach().requires_grad_()
        update = flat(self.tensors(at, labels, differentiable=True), self.names)
        return [
            torch.autograd.grad(update, at, vector, retain_graph=k < len(vectors) - 1)[0]
            for k, vector in enumerate(vectors)
        ]

    def _batches(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        steps = self._training.steps
        if self._training.batches == "same" or steps == 1:
            return [(images, labels)] * steps
        return list(zip(images.chunk(steps), labels.chunk(steps), strict=True))


def flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """Returns the tensors of `names` as one vector."""
    return torch.cat([tensors[name].flatten() for name in names])


def spectrum(
    update_map: UpdateMap,
    images: Tensor,
    labels: Tensor,
    start: Tensor,
    short: float,
    steps: int = LANCZOS_STEPS,
) -> Spectrum:
    """Returns the spectrum of J'J as `start` sees it, by so many steps of Lanczos.

    Its nodes are those of Gaussian quadrature (Golub and Meurant, Matrices, Moments and
    Quadrature, 2010): sums over them of a smooth function of an eigenvalue are close to those over
    all eigenvalues, from few steps on.

    Args:
        update_map: U.
        images: (N, C, H, W), normalized, at which J is taken.
        labels: (N,) of the images.
        start: The direction, shaped like the images.
        short: Length of the way from truth to guess, of which difference quotients are a part.
        steps: At most; fewer if the direction's invariant space is smaller.
    """
    short = _STEP * short
    square = float(start.square().sum())
    if square == 0:
        nothing = torch.zeros(1, dtype=torch.float64)
        return Spectrum(eigenvalues=nothing, weights=nothing + 1, square=0.0)
    basis, diagonal, beside = [start / math.sqrt(square)], [], []
    for step in range(steps):
        current = basis[-1]
        ahead = update_map(images + short * current, labels)
        behind = update_map(images - short * current, labels)
        pushed = (ahead - behind) / (2 * short)
        (image,) = update_map.pull_back(images, labels, [pushed])
        diagonal.append(float((image * current).sum()))
        for _ in range(2):  # once is not enough in floating point
            for vector in basis:
                image = image - (image * vector).sum() * vector
        size = float(image.norm())
        if step == steps - 1 or size <= 1e-10 * max(diagonal):
            break
        beside.append(size)
        basis.append(image / size)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for k, size in enumerate(beside):
        tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = size
    eigenvalues, vectors = torch.linalg.eigh(tridiagonal)
    return Spectrum(
        eigenvalues=eigenvalues.clamp_min(0),
        weights=vectors[0].square(),
        square=square,
    )


def slope_share(
    update_map: UpdateMap,
    images: Tensor,
    labels: Tensor,
    way: Tensor,
    error: Tensor | None,
    distance: float,
) -> float:
    """Returns which share of the squared distance to the truth the slope explains.

    At images + distance * way, with r = U(there) - U(images) and the objective's residual
    r - error, that is <J'(r - error), distance * way> / |r|²: 1 where U is linear and the update
    exact. Where units switch, r grows by jumps that no slope shows; near the truth these are most
    of r, and a descent ends there. What pruning does to an update turns the slope from the truth.

    Args:
        update_map: U.
        images: (N, C, H, W), normalized: the truth.
        labels: (N,).
        way: From the truth to the guess.
        error: (m,) of the observed update; None if there is none.
        distance: In units of the way.
    """
    at = images + distance * way
    residual = update_map(at, labels) - update_map(images, labels)
    square = float(residual.square().sum())
    if square == 0:
        return 0.0
    aim = residual if error is None else residual - error
    (slope,) = update_map.pull_back(at, labels, [aim])
    return float((slope * way).sum()) * distance / square
