"""Gaussian noise on the whole update; with `clip` before it, the Gaussian mechanism."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field, model_validator

from fedsim.defense import Guarantee, Mechanism, UpdateDefense, add_gaussian
from fedsim.types import FedsimError, Tensors

_Scale = Annotated[float, Field(ge=0, le=1e12)]


@final
class GaussianNoise(UpdateDefense):
    """Adds N(0, s^2) to every entry, s given by `std` or by `multiplier` times the sensitivity.

    After a defense that bounds the update's norm by S it is the Gaussian mechanism on what a client
    releases: all of the client's data are hidden, against a client that releases zero plus noise,
    with noise multiplier s / S. A non-finite entry stays non-finite.
    """

    paper: ClassVar[str] = (
        "Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018; on "
        "clients' updates: McMahan et al., Learning Differentially Private Recurrent Language "
        "Models, ICLR 2018"
    )

    std: _Scale | None = None
    """Standard deviation, in the update's units."""
    multiplier: _Scale | None = None
    """Standard deviation over the L2 bound that the defenses before this one prove."""

    @model_validator(mode="after")
    def _one_scale(self) -> GaussianNoise:
        if (self.std is None) == (self.multiplier is None):
            raise ValueError("gaussian_noise takes exactly one of std and multiplier")
        return self

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        """`std`, a 0-d float64, where it depends on what is proven of the update.

        Raises:
            FedsimError: there is a `multiplier` and no bound that it could multiply.
        """
        return {"std": torch.tensor(self._std(sensitivity), dtype=torch.float64)}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """The update itself, bit for bit, where the standard deviation is 0."""
        return add_gaussian(update, float(state["std"]), rng), state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """The Gaussian mechanism, if the update was bounded and no mechanism came before.

        Raises:
            FedsimError: there is a `multiplier` and no bound that it could multiply.
        """
        std = self._std(before.sensitivity, before.reason)
        if std == 0:
            return before
        if before.mechanism:
            return before.unproven("")
        if math.isinf(before.sensitivity):
            return before.unproven("gaussian_noise is added to an unbounded update: put clip first")
        return Guarantee(
            mechanism=Mechanism(
                noise_multiplier=std / before.sensitivity, unit="client", relation="zero_out"
            )
        )

    def _std(self, sensitivity: float, reason: str = "") -> float:
        if self.multiplier is None:
            return self.std or 0.0
        if math.isinf(sensitivity):
            raise FedsimError(
                f"gaussian_noise: multiplier {self.multiplier} has no bound on the update to "
                "multiply; put clip directly before it, or give the standard deviation as std"
                + (f" ({reason})" if reason else "")
            )
        return self.multiplier * sensitivity
