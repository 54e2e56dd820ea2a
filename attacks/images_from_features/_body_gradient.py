"""The gradient of a network's body for known features and error signals of its images.

Behind a two-layer head (`head_gradient`), what `best_features` recovers determines each image's
error signal e_i = ∂L/∂x_i, x_i being its features. What is left of the update, the body's share, is
then Σ_i J(image_i)' e_i, J the derivative of features in parameters: no label, no head and no
probability of a candidate's own enters it, and to each image belongs a known vector of features.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from fedsim.types import Observation
from fedsim_attacks.fast_autograd._tape import Tape, pays
from fedsim_attacks.images_from_features._body import Body, Part, relaid
from fedsim_attacks.images_from_features._later_steps import LaterSteps
from fedsim_attacks.images_from_features._part_update import PartUpdate, nonzero_energy
from fedsim_attacks.images_from_features._signals import Signals

_LEAST_STRETCH = 0.1
"""Of outputs that are known up to a factor; random inputs may make any."""


class Misfit(NamedTuple):
    """How far candidates are from the observation."""

    update: Tensor
    """|u - t|² / |t|² of the body's update (0-d)."""
    features: Tensor
    """Mean of |x_i - f_i|² / |f_i|² (0-d)."""
    slope: Tensor
    """Of `update` + weight `features` in the images (N, C, H, W)."""
    target_changed: bool = False
    """Whether the target has changed, so that earlier misfits cannot be compared with it."""


class PartGradient:
    """The observed update of a part of the body, and its recomputation from candidate inputs."""

    def __init__(
        self,
        observation: Observation,
        body: Body,
        part: Part,
        outputs: Tensor,
        errors: Tensor,
        *,
        scale: Tensor,
        weight: float,
        calls: int,
        unscaled: bool = False,
        later: LaterSteps | None = None,
    ) -> None:
        """Prepares the comparison for inputs of which `part` makes `outputs` (N, ...).

        Args:
            observation: what the server saw.
            body: whose part it is.
            part: layers and parameters.
            outputs: known up to a factor for each image if `unscaled`.
            errors: their error signals (N, ...), then known up to one over that factor.
            scale: that the client's defense has applied to its update.
            weight: of the misfit of outputs.
            calls: how often it is to be evaluated.
            unscaled: whether norm layers have left outputs without a scale.
            later: of an update of several steps, taken for one.
        """
        self._later, self._done, self._calls = later, 0, calls
        self._function, self._unscaled, self._weight = part.function, unscaled, weight
        self._parameters = [parameter for _, parameter in part.parameters]
        self._update = PartUpdate(observation, body, part, scale, approximate=later is not None)
        self._outputs, self._errors = outputs.flatten(1), errors.flatten(1)
        self._lengths = self._outputs.square().sum(1, keepdim=True)
        # A tape would go on as before a correction.
        replayed = pays(calls, outputs.device) and later is None
        self._slopes = Tape(self._differentiate) if replayed else self._differentiate

    def __call__(self, inputs: Tensor) -> Misfit:
        """Evaluates the misfit at `inputs` (N, ...)."""
        corrected = self._later is not None and self._later.correct(
            [self._update], inputs, self._done, self._calls
        )
        self._done += 1
        update, outputs, slope = self._slopes(inputs.detach())
        return Misfit(update, outputs, slope, target_changed=corrected)

    def pulled_back(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the error signals at `inputs` (both (N, ...)): outputs of the part before."""
        with torch.enable_grad():
            variable = inputs.detach().clone().requires_grad_()
            outputs = self._function(variable).flatten(1)
            pull = (outputs * (self._errors / self._scales(outputs.detach()))).sum()
            (errors,) = torch.autograd.grad(pull, variable)
        return inputs.detach(), errors

    def _differentiate(self, inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            variable = relaid(inputs).requires_grad_()
            outputs = self._function(variable).flatten(1)
            scales = self._scales(outputs.detach())
            pull = (outputs * (self._errors / scales)).sum()
            update = torch.autograd.grad(pull, self._parameters, create_graph=True)
        with torch.no_grad():
            residuals, growth = self._update.compared([u.detach() for u in update])
            energy = nonzero_energy(self._update.energy)
            deviation = outputs.detach() / scales - self._outputs
            loss = torch.stack([each.square().sum() for each in residuals]).sum() / energy
            count = self._lengths * len(deviation)
            cotangents = [each.mul_(2 * growth / energy) for each in residuals]
            cotangents.append(2 * self._weight * deviation / (count * scales))
        (slope,) = torch.autograd.grad([*update, outputs], variable, cotangents)
        return loss, (deviation.square() / count).sum(), slope.contiguous()

    def _scales(self, outputs: Tensor) -> Tensor:
        """Computes the factors (N, 1) between `outputs` and the known ones."""
        if not self._unscaled:
            return outputs.new_ones(len(outputs), 1)
        along = (outputs * self._outputs).sum(1, keepdim=True)
        return (along / self._lengths).clamp_min(_LEAST_STRETCH)


@final
class BodyGradient(PartGradient):
    """The observed update of the whole body, and its recomputation from candidate images."""

    def __init__(
        self,
        observation: Observation,
        features: Tensor,
        known: Signals,
        *,
        weight: float,
        width: float,
        calls: int,
        later: LaterSteps | None = None,
    ) -> None:
        """Prepares the comparison for images of `features` (N, d).

        Args:
            observation: what the server saw, as one gradient.
            features: that the images are to have.
            known: what features tell of their images.
            weight: of the misfit of features.
            width: of the jumps of slopes (`smooth_slopes`); 0 leaves them as they are.
            calls: how often it is to be evaluated.
            later: of an update of several steps, taken for one.
        """
        body = Body(observation, width)
        whole = Part(body.model.features, body.parameters(body.model.body))
        super().__init__(
            observation,
            body,
            whole,
            features,
            known.errors,
            scale=known.scale,
            weight=weight,
            calls=calls,
            later=later,
        )
