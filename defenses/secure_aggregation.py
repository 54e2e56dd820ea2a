"""Secure aggregation as a protocol: clients mask what they send, and the server learns the sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, final

from pydantic import Field, model_validator

from fedsim.contracts.defense import MaskedAggregation, ServerRound, SumTerms, add_gaussian
from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.types import Effect, FedsimError, Noise, Tensors, Update
from fedsim_defenses.aggregate import Aggregate, sum_updates

_ROUNDING = 1e-9
"""Relative margin of the noise: more than float64 may add to the length of a rounded vector."""


@final
class SecureAggregation(MaskedAggregation):
    """Adds up masked vectors modulo 2^32 or 2^64; the server opens their sum and nothing else.

    Each client clips entries to [-`range`, `range`] and weights them by its number of examples. It
    rounds them stochastically and adds masks: one of its own, and one in common with each
    neighbour. A sum opens if `threshold` of the participants are in it and as many help to remove
    the masks. With fewer nothing opens, and the model stays as it was.

    With a `noise_multiplier` z each client also adds noise, and every client counts the same. Any
    sum that opens then has noise of at least z times the update's L2 bound, by clients that do not
    collude: nobody has to be trusted with it. More clients in a sum mean more noise.

    The server learns who takes part, how many examples there are in all, and the sum. What it can
    do beyond that if it does not keep to the protocol: docs/secure-aggregation.md.
    """

    averages: ClassVar[bool] = True

    paper: ClassVar[str] = (
        "Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, "
        "CCS 2017; neighbours: Bell et al., Secure Single-Server Aggregation with "
        "(Poly)Logarithmic Overhead, CCS 2020; noise: Kairouz, Liu and Steinke, The Distributed "
        "Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation, ICML 2021"
    )

    range: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Bound on an entry of an update; default: the L2 bound that the defenses before prove."""
    buffer_range: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Bound on an entry of batch-norm statistics, required where clients release such; default:
    none."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] = 2 / 3
    """Share of a round's participants without whom no sum opens; above (1 + `colluding`) / 2."""
    colluding: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the participants that may tell the server their secrets and their noise."""
    noise_multiplier: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """z: standard deviation of the noise of as few honest clients as a sum may have, over the L2
    bound on an update; 0: no noise."""

    @model_validator(mode="after")
    def _majority(self) -> SecureAggregation:
        if self.threshold <= (1 + self.colluding) / 2:
            raise ValueError(
                f"threshold: expected above {(1 + self.colluding) / 2:g} (half of the honest, and "
                f"all that collude), got {self.threshold:g}: else a server gets both secrets of a "
                "client"
            )
        return self

    def terms(self, before: Guarantee, most_examples: int) -> SumTerms:
        """Returns the public terms of a sum of clients with up to `most_examples` examples each.

        A FedsimError says that an update has no bound for its range, or for the noise.
        """
        if self.range is None and math.isinf(before.sensitivity):
            raise FedsimError(
                "secure_aggregation: nothing bounds an update's entries, which have to be of a "
                "known range; put clip before it, or give range"
                + (f" ({before.reason})" if before.mechanism else "")
            )
        if self.noise_multiplier and math.isinf(before.sensitivity):
            raise FedsimError(
                f"secure_aggregation: noise_multiplier {self.noise_multiplier:g} has no bound on "
                "the update to multiply; put clip directly before it"
            )
        noise = self.noise_multiplier * before.sensitivity if self.noise_multiplier else 0.0
        # No entry exceeds the L2 bound, which so serves as a range.
        bound = before.sensitivity if self.range is None else self.range
        return SumTerms(
            threshold=self.threshold,
            colluding=self.colluding,
            range=bound,
            buffer_range=self.buffer_range or 0.0,
            # Weights would multiply a client's bound: with noise, each client counts once.
            most_examples=1 if noise else most_examples,
            norm=before.sensitivity if noise else math.inf,
            noise=noise * (1 + _ROUNDING),
        )

    def combine(self, updates: Iterable[Update]) -> Update:
        """Returns the mean of the updates, clipped where a range is given; with noise, their sum.

        The mean and its errors are those of `Aggregate.combine`. With a `noise_multiplier` it is
        the unweighted sum of tensors, for `add_noise`, and mean of buffers.
        """
        clipped = self._clip_updates(updates)
        if self.noise_multiplier:
            return sum_updates(clipped, "secure_aggregation")
        return Aggregate().combine(clipped)

    def add_noise(self, combined: Update, round: ServerRound) -> Update:
        """Returns `combined` as it is or, with noise, (`combined` + noise) / `round.clients`."""
        if not self.noise_multiplier:
            return combined
        std = self._noise_of_all(round.sensitivity)
        noisy = add_gaussian(combined.tensors, std, round.stream)
        return replace(combined, tensors={n: value / round.clients for n, value in noisy.items()})

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns the noise's mechanism, else as `Aggregate.guarantee`; FedsimError as `terms`."""
        self.terms(before, 1)
        if not self.noise_multiplier or before.mechanism:
            if before.pooled and self.colluding:
                # who colludes tells its share of the noise
                before = replace(before, pooled=before.pooled.with_share(1 - self.colluding))
            return Aggregate().guarantee(before)
        return Guarantee(
            mechanism=Mechanism(
                noise_multiplier=self.noise_multiplier,
                unit="client",
                relation="zero_out",
                holds=(
                    f"a share of at least {self.threshold:.4g} of a round's participants is in "
                    f"each sum that opens (else none does), and at most {self.colluding:.4g} "
                    "collude with the server"
                ),
            )
        )

    def seen_by_one_of(self, participants: int) -> SecureAggregation:
        """Returns a copy with the noise that is left without that of one, or of who colludes.

        The larger of both parts is taken off. See `AggregationDefense.seen_by_one_of`.
        """
        # The fewest clients in a sum that opens, less those whose shares are known: who colludes,
        # or the one, which may be one of those.
        honest = participants * self.threshold - max(1.0, participants * self.colluding)
        left = max(0.0, honest / (participants * (self.threshold - self.colluding)))
        # Shares' variances add up, so that the deviation falls by the root of what is left.
        return self.model_copy(update={"noise_multiplier": self.noise_multiplier * left**0.5})

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect of noise on the sum; an empty one if clients add none."""
        if not self.noise_multiplier:
            return Effect()
        return Effect(
            noise=(Noise(variance=self._noise_of_all(before.sensitivity) ** 2, on="sum"),)
        )

    def _noise_of_all(self, sensitivity: float) -> float:
        return self.terms(Guarantee(sensitivity=sensitivity), 1).client_noise(1)

    def _clip_updates(self, updates: Iterable[Update]) -> Iterator[Update]:
        for update in updates:
            yield Update(
                tensors=_within(update.tensors, self.range),
                buffers=_within(update.buffers, self.buffer_range),
                num_examples=update.num_examples,
            )


def _within(tensors: Tensors, bound: float | None) -> Tensors:
    if bound is None:
        return tensors
    return {name: tensor.clamp(-bound, bound) for name, tensor in tensors.items()}
