"""CENSOR, which releases a random vector orthogonal to the gradient in its place."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedsim.contracts.defense import GradientFn, LocalStep, TrainingDefense, standard_normal
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, LocalTraining, Tensors

_NOTHING_LEFT = 1e-6
"""Share of a random vector's norm, below which what is left of it is rounding."""


@final
class Censor(TrainingDefense):
    """Replaces each tensor of a step's gradient by a random one, orthogonal to it and as long.

    Several are drawn, and the step takes those after which the batch's loss is least. A tensor of
    one entry has no orthogonal direction, and becomes zero.
    """

    paper: ClassVar[str] = (
        "Zhang, Cheng, Shen, Ribeiro, An, Chen, Zhang and Li, CENSOR: Defense Against Gradient "
        "Inversion via Orthogonal Subspace Bayesian Sampling, NDSS 2025; parameters as in their "
        "code"
    )

    trials: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Number of directions that are drawn."""
    step_size: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate of the trial step after which losses are compared."""
    falls_back: bool = False
    """Whether the gradient itself is released where no direction makes the loss less, as the
    authors' code does."""

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function that draws directions. See `TrainingDefense.gradient`."""

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            true = step.gradient(parameters, images, labels, rng)
            at = {name: value.detach() for name, value in parameters.items()}

            def moved(by: Tensors) -> Tensors:
                return {**at, **{n: at[n] - self.step_size * by[n] for n in by}}

            # Without `falls_back` a first direction replaces the gradient whatever its loss: where
            # weights have diverged, losses are NaN, and nothing would compare as less.
            best = dict(true) if self.falls_back else draw_orthogonal(true, rng)
            least = _loss(step, at if self.falls_back else moved(best), images, labels)
            for _ in range(self.trials - (not self.falls_back)):
                drawn = draw_orthogonal(true, rng)
                loss = _loss(step, moved(drawn), images, labels)
                if loss < least or math.isnan(least):
                    best, least = drawn, loss
            return best

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns no mechanism and no bound: the norms that stay depend on the images."""
        return Guarantee(reason="censor keeps norms and the orthogonal space of the gradient")

    def effect(self, training: LocalTraining) -> Effect:
        """Returns a `mixed` Effect, `orthogonal` after one step and without `falls_back`."""
        return Effect(mixed=True, orthogonal=training.steps == 1 and not self.falls_back)


def draw_orthogonal(gradient: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
    """Draws for each tensor of `gradient` one of its length and type, in a random direction.

    The direction is uniform among those orthogonal to it. A tensor of one entry gives 0.
    """
    drawn = {}
    for name, random in standard_normal(gradient, rng).items():
        # In float64: rounding in float32 would leave more of what lies along the gradient.
        true = gradient[name].detach().double()
        norm = true.norm()
        unit = true / norm.clamp_min(torch.finfo(true.dtype).tiny)
        # Normal values have no preferred direction, nor has their projection in its subspace.
        left = random - (random * unit).sum() * unit
        size = left.norm()
        # One entry has no orthogonal direction: what is left of it is rounding, and becomes 0.
        scale = torch.where(size > _NOTHING_LEFT * random.norm(), norm / size, 0)
        drawn[name] = (scale * left).to(gradient[name].dtype)
    return drawn


def _loss(step: LocalStep, parameters: Tensors, images: Tensor, labels: Tensor) -> float:
    """Returns the batch's mean cross-entropy, which leaves batch-norm statistics as they are."""
    if not len(labels):  # an empty batch prefers no direction
        return 0.0
    head = {
        name.removeprefix("head."): value
        for name, value in parameters.items()
        if name.startswith("head.")
    }
    with torch.no_grad():
        features = step.features(parameters, images)
        logits = functional_call(step.model.head, head, (features,))  # type: ignore[arg-type]
        return float(F.cross_entropy(logits, labels))
