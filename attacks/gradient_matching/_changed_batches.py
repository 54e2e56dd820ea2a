"""What an attacker makes of a batch that a defense changed before the gradient was taken.

Copies of an image are simulated: one candidate is fitted to the gradient of all of its views. What
was drawn is undone, after the inputs of the step were fitted as if they were the images: a view as
the one that leaves the smoothest image, mixtures by independent component analysis, as edges of
photographs are sparse, and those of mixtures less so (Bell and Sejnowski, The "independent
components" of natural scenes are edge filters, Vision Research 1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedsim.contracts.views import apply_view
from fedsim.types import Augmentation, ImageChange, Mixture, ModelSpec
from fedsim_attacks.gradient_matching._drawing import Adam, half_cosine
from fedsim_attacks.gradient_matching._image_priors import total_variation

_VIEW_STEPS, _VIEW_RATE, _SMOOTHNESS = 150, 0.1, 0.02
"""Steps of Adam and their size by which a view is undone, and the weight of total variation."""
_RESTARTS, _MIXTURE_STEPS, _MIXTURE_RATE = 16, 400, 0.05
"""Starts of the separation, steps of Adam from each, and their size."""
_INVALID = 10.0  # weight of the mean squared excess over the valid range, beside logarithms
_LEAST_EDGE, _RIDGE = 1e-3, 1e-4
"""Numbers that keep the logarithm of no edges, and the inverse of equal rows, finite."""


@final
@dataclass(frozen=True, kw_only=True)
class ChangedBatch:
    """The changes of a step's batch, as far as an attack allows for them."""

    copied: tuple[Augmentation, ...] = ()  # changes that are simulated: nothing of them is drawn
    drawn: tuple[Augmentation | Mixture, ...] = ()
    """Changes that come before those, and are undone."""

    @staticmethod
    def read(changes: Sequence[Augmentation | Mixture]) -> ChangedBatch:
        """Parts `changes`, in the order in which they act; allows for none if copies are drawn."""
        copied: list[Augmentation] = []
        left = list(changes)
        # Copies that were made last are functions of a step's inputs, without chance.
        while left and isinstance(last := left[-1], Augmentation) and last.copies:
            copied.insert(0, last)
            left.pop()
        if any(isinstance(change, Augmentation) and change.copies for change in left):
            # Each copy is then an input of its own, of which there are more than images.
            return ChangedBatch()
        return ChangedBatch(copied=tuple(copied), drawn=tuple(left))

    @property
    def signed(self) -> bool:
        """Whether inputs have random signs, so that they are not smooth."""
        return any(isinstance(change, Mixture) and change.signs for change in self.drawn)

    def simulate(self, inputs: Tensor, labels: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
        """Returns all copies' inputs and labels, view after view, differentiable in those given."""
        for change in self.copied:
            inputs = torch.cat([apply_view(inputs, view, spec) for view in change.views])
            labels = torch.cat([labels] * len(change.views))
        return inputs, labels

    def undo(
        self,
        inputs: Tensor,
        labels: Tensor,
        spec: ModelSpec,
        box: tuple[Tensor, Tensor],
        rng: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Returns images and labels that were drawn from; both may leave their range.

        Args:
            inputs: Normalized inputs (B, C, H, W) of one step.
            labels: Class numbers (B,), which stay, or probabilities (B, K), which are separated.
            spec: The victim's model, whose inputs are normalized.
            box: Normalized pixels 0 and 1, (C, 1, 1) each.
            rng: Source of the separation's starts, on the CPU.
        """
        # What acted last is undone first.
        for change in reversed(self.drawn):
            if isinstance(change, Augmentation):
                inputs = _undo_view(inputs, change.views, spec, box)
            elif change.signs:
                inputs = _fold_signs(inputs, box)
            elif len(inputs) > 1:  # a mixture of one input is itself
                apart = _separate(inputs, box, rng).to(inputs.dtype)
                inputs = torch.einsum("ij,jchw->ichw", apart, inputs)
                # Probabilities were mixed with the same weights; class numbers cannot be parted.
                labels = apart @ labels if labels.is_floating_point() else labels
        return inputs, labels


def _undo_view(
    inputs: Tensor,
    views: Sequence[Sequence[ImageChange]],
    spec: ModelSpec,
    box: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns for each of `inputs` (B, C, H, W) the image that it most likely is a view of."""
    # Least squares with total variation, which also fills what a view does not show.
    best = torch.full((len(inputs),), torch.inf, device=inputs.device)
    answer = inputs.clone()
    for view in views:
        images = inputs.detach().clone().contiguous()
        optimizer = Adam([images])
        for step in range(_VIEW_STEPS):
            with torch.enable_grad():
                variable = images.detach().requires_grad_()
                misfit = (apply_view(variable, view, spec) - inputs).square().mean((1, 2, 3))
                (slope,) = torch.autograd.grad(misfit.sum(), variable)
            # The variation is a mean over images, and the misfit is a sum.
            slope = slope + _SMOOTHNESS * len(inputs) * total_variation(images)[1]
            optimizer.step([slope], _VIEW_RATE * half_cosine(step / _VIEW_STEPS))
            images.clamp_(*box)
        # One by one, since the variation of several images is their mean, and each is judged alone.
        varies = torch.stack([total_variation(image[None])[0] for image in images])
        misfit = (apply_view(images, view, spec) - inputs).square().mean((1, 2, 3))
        objective = misfit + _SMOOTHNESS * varies
        better = objective < best
        best = torch.where(better, objective, best)
        answer = torch.where(better[:, None, None, None], images, answer)
    return answer


def _fold_signs(inputs: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """Returns `inputs` without their random signs: all entries on the wider side of the range."""
    # Signs hide the side of the mean color, and not how far from it. All is valid on the wider one.
    low, high = box
    return inputs.abs() * torch.where(high >= -low, 1.0, -1.0)


def _separate(inputs: Tensor, box: tuple[Tensor, Tensor], rng: torch.Generator) -> Tensor:
    """Returns W (B, B) float64: W times `inputs`, mixtures of B > 1 images, is the images."""
    count = len(inputs)
    pixels = inputs.detach().double()
    # Differences are linear: those of the images are W times those of the inputs.
    edges = torch.cat([(pixels.diff(dim=dim)).flatten(1) for dim in (2, 3)], 1)
    flat = pixels.flatten(1)
    low, high = (limit.double().expand(inputs.shape[1:]).flatten() for limit in box)
    identity = torch.eye(count, dtype=torch.float64)
    # Starts favour the image of an input's own place, so that images keep the inputs' order.
    start = 2 * identity + torch.randn(_RESTARTS, count, count, generator=rng).double()
    identity, logits = identity.to(flat.device), start.to(flat.device)
    optimizer = Adam([logits])
    for _ in range(_MIXTURE_STEPS):
        with torch.enable_grad():
            variable = logits.detach().requires_grad_()
            # Softmax makes each row positive with sum 1, as coefficients are.
            mixing = variable.softmax(2)
            apart = torch.linalg.inv(mixing + _RIDGE * identity)
            images = apart @ flat
            # The logarithm is what a Laplacian's likelihood leaves once its scale is the likeliest.
            sizes = ((apart @ edges).abs().mean(2) + _LEAST_EDGE).log().sum(1)
            excess = (images - high).clamp_min(0) + (low - images).clamp_min(0)
            invalid = excess.square().mean((1, 2))
            # The determinant is of W^-1. Without it, W = 0 would have the smallest edges.
            objective = sizes + torch.linalg.slogdet(mixing)[1] + _INVALID * invalid
            (slope,) = torch.autograd.grad(objective.sum(), variable)
        optimizer.step([slope], _MIXTURE_RATE)
    # A start that diverged must not be the least.
    objective = objective.detach().nan_to_num(torch.inf)
    best: Tensor = apart.detach()[objective.argmin()]
    return best
