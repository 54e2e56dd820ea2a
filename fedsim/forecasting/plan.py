"""What is forecast: one client's update as an attacker will be told of it, and stand-in images."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.grant import Grant
from fedsim.contracts.stack import Stack
from fedsim.models.base import normalize
from fedsim.types import LocalTraining, ModelSpec, Observation
from fedsim.words import number_of


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """Images in the place of the victims', whom nobody needs to forecast by."""

    pixels: Tensor
    """(P, C, H, W) in [0, 1]."""
    labels: Tensor
    """(P,) int64."""
    guess: Tensor
    """(C, H, W): the image that an attacker guesses who saw no update."""
    source: str
    """Where they come from, for people."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One update: of which model and batch it will be, behind which defenses."""

    stack_name: str
    observations: tuple[Observation, ...]
    """As an attacker is told, one of each round that is looked at. `update` may be empty."""
    stack: Stack
    declared: LocalTraining
    """The local training before the stack's training defenses."""
    grant: Grant
    stand_ins: StandIns

    @property
    def first(self) -> Observation:
        """The earliest round's."""
        return self.observations[0]

    @property
    def training(self) -> LocalTraining:
        """The local training behind the stack's training defenses."""
        return self.first.training

    def of_batches(self, size: int, clients: int) -> Plan:
        """Returns the same plan for batches of `size` images, of so many clients."""
        return replace(
            self,
            observations=tuple(
                replace(
                    each,
                    training=replace(each.training, batch_size=size),
                    num_clients=clients,
                )
                for each in self.observations
            ),
            declared=replace(self.declared, batch_size=size),
        )

    def drawn(self, draw: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (normalized images, labels, way to the guess), in float64.

        The batches of a smaller size are the beginnings of those of a larger one.

        Args:
            draw: Which of several, from 0.
            largest: Batch size of the plan that this one was made of; at least its own.
        """
        steps = self.training.steps if self.training.batches == "different" else 1
        groups = steps * self.first.num_clients
        stream = rng.generator(self.first.seed, "stand-ins", draw)
        count = len(self.stand_ins.pixels)
        order = torch.cat(
            [torch.randperm(count, generator=stream) for _ in range(-(-groups * largest // count))]
        )
        chosen = order[: groups * largest].view(groups, largest)
        chosen = chosen[:, : self.training.batch_size].flatten()
        spec = self.first.model
        images = normalize(self.stand_ins.pixels[chosen].double(), spec)
        guess = normalize(self.stand_ins.guess[None].double(), spec)
        return images, self.stand_ins.labels[chosen], guess - images


def synthetic(spec: ModelSpec, seed: int, count: int = 64) -> StandIns:
    """Draws images whose amplitudes fall with frequency as photographs' do, and labels.

    The amplitude spectrum 1/f is that of natural images (Field, Relations between the statistics
    of natural images and the response properties of cortical cells, JOSA A 1987).
    """
    stream = rng.generator(seed, "synthetic")
    channels, height, width = spec.input_shape
    white = torch.randn(count, channels, height, width, generator=stream)
    down, across = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = torch.hypot(down, across).clamp_min(1 / max(height, width, 2))
    shaped = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(height, width))
    deviation = shaped.std().clamp_min(1e-12)
    return StandIns(
        pixels=(0.5 + 0.25 * shaped / deviation).clamp(0, 1),
        labels=torch.randint(spec.num_classes, (count,), generator=stream),
        guess=torch.full(spec.input_shape, 0.5),
        source=f"{number_of(count, 'synthetic image')} with the spectrum of photographs",
    )
