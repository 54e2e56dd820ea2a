"""LocalDpMod, the modifier of Flower's clients that clips an update and adds Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.defense import UpdateDefense, add_gaussian
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors
from fedsim_defenses.clip import Clip
from fedsim_defenses.gaussian_noise import GaussianNoise


@final
class LocalDpMod(UpdateDefense):
    """Clips the update to a norm and adds N(0, s²), s = sensitivity sqrt(2 ln(1.25 / δ)) / ε.

    Flower asks for a sensitivity, and ties it to nothing. What is proven follows from s over
    `clipping_norm`, over all rounds; the ε that is written here is shown beside it. A tensor that
    is a single number counts for the norm, and passes unclipped and without noise: NumPy hands
    Flower a copy of it. An update whose norm is not finite becomes noise alone.
    """

    paper: ClassVar[str] = (
        "Flower 1.41, flwr.clientapp.mod.LocalDpMod; noise: Dwork and Roth, The Algorithmic "
        "Foundations of Differential Privacy, 2014, Theorem A.1, proven for ε < 1"
    )

    deployed_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        part: {name: name for name in ("clipping_norm", "sensitivity", "epsilon", "delta")}
        for part in (
            "flwr.clientapp.mod.localdp_mod.LocalDpMod",
            "flwr.client.mod.localdp_mod.LocalDpMod",
            # The filter of a hospital platform (github.com/londonaicentre/FLIP), alike by design.
            "flip.nvflare.components.local_dp.LocalDifferentialPrivacy",
        )
    }

    clipping_norm: Annotated[float, Field(ge=1e-12, le=1e12)]
    """L2 bound on the update."""
    sensitivity: Annotated[float, Field(gt=0, le=1e12)]
    """Sensitivity that the user declares, in the update's units."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)]
    """ε of one round that the user declares."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """δ of `epsilon`."""

    @property
    def claimed_epsilon(self) -> float:
        """The parameter `epsilon`, which Flower claims for one round."""
        return self.epsilon

    @property
    def std(self) -> float:
        """Standard deviation s of the noise on an entry, in the update's units."""
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the clipped update with noise, and `state`. See `UpdateDefense.apply`."""
        clipped, _ = self._clip.apply(update, {}, rng)
        passed = {name: tensor for name, tensor in update.items() if not tensor.ndim}
        return {**add_gaussian(clipped, self.std, rng), **passed}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns a Gaussian mechanism unless `before` has one, lacks shapes, or has a shape ()."""
        if before.shapes is None or not all(before.shapes):
            return before.unproven("local_dp_mod passes a tensor that is a single number as it is")
        return self._noise.guarantee(self._clip.guarantee(before))

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect that is `scaled`, with a `bound` and noise on the update."""
        clipped = self._clip.guarantee(before)
        return self._clip.effect(before).then(self._noise.effect(clipped))

    def public_parameters(self, before: Guarantee) -> dict[str, float]:
        """Returns {`std`: standard deviation of the noise}."""
        return {"std": self.std}

    @property
    def _clip(self) -> Clip:
        return Clip(norm=self.clipping_norm)

    @property
    def _noise(self) -> GaussianNoise:
        return GaussianNoise(std=self.std)
