"""Gaussian noise on the whole update; with `clip` before it, the Gaussian mechanism."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field, model_validator

from fedsim.contracts.defense import UpdateDefense, add_gaussian
from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.privacy.numerics import gaussian
from fedsim.types import Effect, FedsimError, Noise, Tensors

_Scale = Annotated[float, Field(ge=0, le=1e12)]


@final
class GaussianNoise(UpdateDefense):
    """Adds N(0, s²) to every entry, where s is `std`, or `multiplier` times the L2 bound S.

    With `epsilon` and `delta`, s is the least that makes one release (ε, δ)-private: the analytic
    Gaussian mechanism. Exactly one of these three is given. The ledger composes all rounds.

    Behind a defense that bounds the update's norm by S it is the Gaussian mechanism of a client's
    release. All of the client's data are hidden, against a client that releases zero plus noise.
    The noise multiplier is s / S. A non-finite entry stays non-finite.
    """

    paper: ClassVar[str] = (
        "Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018; on "
        "clients' updates: McMahan et al., Learning Differentially Private Recurrent Language "
        "Models, ICLR 2018"
    )

    std: _Scale | None = None
    """Standard deviation, in the update's units."""
    multiplier: _Scale | None = None
    """Standard deviation over the L2 bound that the defenses before this one prove; without one,
    methods raise a FedsimError."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """ε of one release, from which the multiplier follows; it needs a bound, too."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """δ of `epsilon`."""

    @model_validator(mode="after")
    def _one_scale(self) -> GaussianNoise:
        given = (self.std is not None, self.multiplier is not None, self.epsilon is not None)
        if sum(given) != 1 or (self.epsilon is None) != (self.delta is None):
            raise ValueError(
                "gaussian_noise takes exactly one of std, multiplier, and epsilon with delta"
            )
        return self

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        """Returns {`std`: standard deviation, 0-d float64}; FedsimError if it lacks a bound."""
        return {"std": torch.tensor(self._std(sensitivity), dtype=torch.float64)}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Adds noise of `state["std"]`; returns `state` as it is. See `UpdateDefense.apply`."""
        return add_gaussian(update, float(state["std"]), rng), state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns a Gaussian mechanism if `before` has a bound and no mechanism; errors as `init`.

        Else the claim of `before` stays, without its bound on the update unless `std` is 0.
        """
        std = self._std(before.sensitivity, before.reason)
        if std == 0:
            return before
        # More noise keeps a claim that holds already, but the update's bound is lost.
        if before.mechanism:
            return before.unproven("")
        if math.isinf(before.sensitivity):
            return before.unproven("gaussian_noise is added to an unbounded update: put clip first")
        return Guarantee(
            mechanism=Mechanism(
                noise_multiplier=std / before.sensitivity, unit="client", relation="zero_out"
            )
        )

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect of noise on the update, empty for `std` 0; FedsimError as `init`."""
        std = self._std(before.sensitivity, before.reason)
        return Effect(noise=(Noise(variance=std**2, on="update"),) if std else ())

    def public_parameters(self, before: Guarantee) -> dict[str, float]:
        """Returns {`std`: standard deviation in use}; FedsimError as `init`."""
        return {"std": self._std(before.sensitivity, before.reason)}

    def _std(self, sensitivity: float, reason: str = "") -> float:
        multiplier = self.multiplier
        if self.epsilon is not None and self.delta is not None:
            # rounding must not lift what is then stated above what is asked
            multiplier = float(gaussian.noise_multiplier(self.epsilon, self.delta)) * (1 + 1e-12)
        if multiplier is None:
            return self.std or 0.0
        if math.isinf(sensitivity):
            raise FedsimError(
                f"gaussian_noise: multiplier {multiplier:g} has no bound on the update to "
                "multiply; put clip directly before it, or give the standard deviation as std"
                + (f" ({reason})" if reason else "")
            )
        return multiplier * sensitivity
