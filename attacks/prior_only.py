"""The control that never sees the gradient: what a U-Net draws when nothing but a prior asks it to.

Pictures of `feature_inversion` are worth no more than what they gain over these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim import rng as streams
from fedsim.adversary import Attack, AttackState
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks.unet import UNet
from fedsim_attacks.variation import total_variation


@dataclass(kw_only=True)
class Drawing(AttackState):
    """The network and its optimizer."""

    network: UNet
    optimizer: torch.optim.Adam


@final
class PriorOnly(Attack[Drawing]):
    """Minimizes the total variation of an untrained U-Net's images, and nothing else."""

    paper: ClassVar[str] = "fedsim: control (Ulyanov et al., Deep Image Prior, CVPR 2018)"

    iterations: Annotated[int, Field(ge=1)] = 100
    """Of Adam; more only make the images flatter."""
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Channels of the U-Net at full resolution."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Of Adam."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Drawing:
        """A U-Net of random weights; of the observation only the shape of its images counts."""
        device = next(iter(observation.parameters.values())).device
        with streams.global_stream(int(torch.randint(2**31, (), generator=rng))):
            network = UNet(observation.num_images, observation.model.input_shape, 0, self.width)
        network = network.to(device)
        return Drawing(
            loss=torch.full((), torch.inf, device=device),
            network=network,
            optimizer=torch.optim.Adam(network.parameters(), lr=self.learning_rate, fused=True),
        )

    def step(self, state: Drawing) -> Drawing:
        """One step of Adam."""
        with torch.enable_grad():
            images = state.network(None)
        state.loss, slope = total_variation(images.detach())
        state.optimizer.zero_grad()
        images.backward(slope)
        state.optimizer.step()
        state.iteration += 1
        return state

    def terminate(self, state: Drawing) -> bool:
        """After `iterations`."""
        return state.iteration >= self.iterations

    def postprocess(self, state: Drawing) -> Reconstruction:
        """What is drawn in the end."""
        with torch.no_grad():
            images = state.network(None)
        return Reconstruction(
            images=images.float(), loss=float(state.loss), iterations=state.iteration
        )

    def total(self) -> int:
        """`iterations`."""
        return self.iterations
