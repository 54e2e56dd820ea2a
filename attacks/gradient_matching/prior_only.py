"""The control that never sees the gradient: what is drawn when nothing but a prior asks for it.

Pictures of an attack are worth no more than what they gain over these. The control is to have the
prior of the attack that it controls: what draws the images, which total variation of which weight,
and whether the images are stretched in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim import rng as streams
from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import denormalize, normalize
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim_attacks.gradient_matching._contrast import exposed
from fedsim_attacks.gradient_matching._unet import UNet
from fedsim_attacks.gradient_matching._variation import (
    chromatic_variation,
    opponent_variation,
    total_variation,
)
from fedsim_attacks.gradient_matching.inverting_gradients import decayed

_RATES = {"pixel": 0.1, "unet": 1e-3}
_VARIATIONS = {
    "absolute": total_variation,
    "chromatic": chromatic_variation,
    "opponents": opponent_variation,
}


@dataclass(kw_only=True)
class Drawing(AttackState):
    """What draws the images, its optimizer, and the images of least own loss."""

    spec: ModelSpec
    draw: Callable[[], Tensor]
    """The images (N, C, H, W), normalized; differentiable in what is optimized."""
    pixels: Tensor | None
    """What is optimized, if it is the images themselves."""
    box: tuple[Tensor, Tensor]
    """Normalized images (1, C, 1, 1) of the pixels 0 and 1."""
    optimizer: torch.optim.Adam
    schedule: torch.optim.lr_scheduler.MultiStepLR
    best: Tensor
    best_loss: Tensor


@final
class PriorOnly(Attack[Drawing]):
    """Minimizes the total variation of images that it draws, and nothing else.

    With the defaults it controls feature_inversion; factored_inversion has `prior: pixel`,
    `variation: chromatic` and 0.02, and behind noise and group norm `stretched`.
    """

    paper: ClassVar[str] = "fedsim: control (Ulyanov et al., Deep Image Prior, CVPR 2018)"

    iterations: Annotated[int, Field(ge=1)] = 100
    """Of Adam; more only make the images flatter."""
    prior: Literal["unet", "pixel"] = "unet"
    """What is optimized: the weights of an untrained U-Net, or pixels that start at N(0, 1)."""
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Channels of the U-Net at full resolution."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Of Adam, divided by 10 at 3/8, 5/8 and 7/8; default 0.001 for the U-Net, 0.1 for pixels."""
    total_variation: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the total variation; of 0, what is drawn at first."""
    variation: Literal["absolute", "chromatic", "opponents"] = "absolute"
    """Of all channels alike, with three times the weight in color, or of the channels and their
    differences."""
    stretched: bool = False
    """Whether each image is finally multiplied by what makes it fill the valid pixels."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Drawing:
        """Random weights or pixels; of the observation only the shape of its images counts."""
        device = next(iter(observation.parameters.values())).device
        spec, count = observation.model, observation.num_images
        seed = int(torch.randint(2**31, (), generator=rng))
        pixels, network = None, None
        if self.prior == "pixel":
            pixels = torch.randn(count, *spec.input_shape, generator=rng).to(device)
            variables = [pixels.requires_grad_()]
        else:
            with streams.global_stream(seed):
                network = UNet(count, spec.input_shape, 0, self.width).to(device)
            variables = list(network.parameters())

        def draw() -> Tensor:
            if network is None:
                assert pixels is not None
                return pixels
            return normalize(network(None), spec)

        ends = torch.zeros(1, spec.input_shape[0], 1, 1, device=device)
        rate = _RATES[self.prior] if self.learning_rate is None else self.learning_rate
        optimizer = torch.optim.Adam(variables, lr=rate, fused=True)
        infinite = torch.full((), torch.inf, device=device)
        return Drawing(
            loss=infinite,
            spec=spec,
            draw=draw,
            pixels=pixels,
            box=(normalize(ends, spec), normalize(ends + 1, spec)),
            optimizer=optimizer,
            schedule=decayed(optimizer, self.iterations),
            best=draw().detach().clone(),
            best_loss=infinite,
        )

    def step(self, state: Drawing) -> Drawing:
        """One step of Adam; pixels stay valid."""
        with torch.enable_grad():
            drawn = state.draw()
        images = drawn.detach()
        variation, slope = _VARIATIONS[self.variation](images)
        state.loss = self.total_variation * variation
        better = state.loss < state.best_loss
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best = torch.where(better, images, state.best)
        slope = self.total_variation * slope
        state.optimizer.zero_grad()
        if state.pixels is None:
            torch.autograd.backward(drawn, slope)
        else:
            state.pixels.grad = slope
        state.optimizer.step()
        state.schedule.step()
        if state.pixels is not None:
            state.pixels.data.clamp_(*state.box)
        state.iteration += 1
        return state

    def terminate(self, state: Drawing) -> bool:
        """After `iterations`."""
        return state.iteration >= self.iterations

    def postprocess(self, state: Drawing) -> Reconstruction:
        """The images of least total variation, `stretched` if asked for."""
        images = exposed(state.best, state.box) if self.stretched else state.best
        return Reconstruction(
            images=denormalize(images, state.spec).clamp(0, 1).float().contiguous(),
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def total(self) -> int:
        """`iterations`."""
        return self.iterations
