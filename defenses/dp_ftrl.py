"""DP-FTRL: a trusted server noises its aggregate, and takes back part of the last round's noise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar, final

from pydantic import Field

from fedsim.contracts.defense import NoisyAggregation, ServerRound, add_noise, standard_normal
from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.types import Effect, FedsimError, Noise, Update
from fedsim_defenses.aggregate import sum_updates

_ROUNDING = 2.0**-22
"""Largest rounding between the sums of two worlds: share of a client's bound, for each client.
Each is rounded once, by at most 2^-24 of its length, which is at most the bound times the clients.
"""


@final
class DPFTRL(NoisyAggregation):
    """Shows the sum of the clients' updates plus S (z_t - λ z_(t-1)), over the number of clients.

    S bounds a client's update (`clip` has to come before), z_t ~ N(0, z^2) with z the
    `noise_multiplier`, λ the `correlation`; t counts the federation's rounds, and z_0 = 0. The
    divisor is how many clients are asked, whoever answers, and every client counts the same. All
    that a client has is hidden from whoever sees the aggregates, but not from the server that adds
    the noise. The ledger accounts all rounds as one release
    (`fedsim.privacy.composition.correlated`), of the client whose rounds reach the farthest. At λ =
    0 it is DP-FedAvg.
    """

    averages: ClassVar[bool] = True

    paper: ClassVar[str] = (
        "Denisov et al., Improved Differential Privacy for SGD via Optimal Private Linear "
        "Operators on Adaptive Streams, NeurIPS 2022; Kairouz et al., Practical and Private (Deep) "
        "Learning without Sampling or Shuffling, ICML 2021; the correlation: Kalinin et al., "
        "DP-CGD: Efficient Noise Correlation for Differentially Private Model Training, 2026; "
        "λ = 0: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR "
        "2018"
    )

    noise_multiplier: Annotated[float, Field(ge=0, le=1e12)]
    """z: standard deviation of z_t on the sum of updates, over S."""
    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """λ: share of the last round's noise that is taken back."""

    def combine(self, updates: Iterable[Update]) -> Update:
        """Returns the sum of tensors and mean of buffers. See `AggregationDefense.combine`."""
        return sum_updates(updates, "dp_ftrl")

    def add_noise(self, combined: Update, round: ServerRound) -> Update:
        """Returns (`combined` + noise) / `round.clients`. See `NoisyAggregation.add_noise`."""
        tensors = combined.tensors
        if self.noise_multiplier:
            noise = standard_normal(tensors, round.stream)
            if round.before and self.correlation:
                # z_(t-1) is drawn again from its own stream: the server need not keep it.
                last = standard_normal(tensors, round.before)
                noise = {n: value - self.correlation * last[n] for n, value in noise.items()}
            # Noise is sized for a little more than the bound, since sums of floats round.
            reach = round.sensitivity * (1 + _ROUNDING * round.clients)
            tensors = add_noise(tensors, self.noise_multiplier * reach, noise)
        return replace(combined, tensors={n: value / round.clients for n, value in tensors.items()})

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns the server's mechanism, if it adds noise and `before` has none, else that claim.

        With noise, a FedsimError refuses updates without a bound.
        """
        if self.noise_multiplier == 0:
            return before.unproven("dp_ftrl adds no noise: its noise_multiplier is 0")
        if math.isinf(before.sensitivity):
            raise FedsimError(
                f"dp_ftrl: noise_multiplier {self.noise_multiplier} has no bound on the update to "
                "multiply; put clip directly before it"
            )
        # A sum of updates that are private already stays so: more noise is post-processing.
        if before.mechanism:
            return before
        return Guarantee(
            mechanism=Mechanism(
                noise_multiplier=self.noise_multiplier,
                unit="client",
                relation="zero_out",
                correlation=self.correlation,
                shared=True,
            )
        )

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect of noise on the sum; an empty one if `noise_multiplier` is 0."""
        if self.noise_multiplier == 0:
            return Effect()
        variance = (self.noise_multiplier * before.sensitivity) ** 2
        return Effect(noise=(Noise(variance=variance, on="sum", correlation=self.correlation),))
