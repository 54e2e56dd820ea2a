"""Counts what clients release over the rounds, and finds the noise that keeps to an asked ε.

Counts are those of the client that is worst off: the most participations, the most probes and the
least data. How much a client holds is known from the census, and it is taken to be public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from fedsim.contracts.defense import AskedEpsilon, NoisyAggregation
from fedsim.contracts.stack import Stack
from fedsim.privacy.ledger import Entry, ProbeReleases, claim, worst_client_sizes
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.numerics.special import least_noise
from fedsim.scenario import Scenario
from fedsim.scenario.document import blaming
from fedsim.training.schedule import Schedule
from fedsim.types import FedsimError, LocalTraining
from fedsim.words import number_of


def asked_epsilons(stack: Stack) -> list[AskedEpsilon]:
    """Returns the ε of each defense of `stack` that declares an ε in place of a noise."""
    return [one.target for one in stack.training_defenses if one.target]


def epsilon_of_rounds(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Returns ε at `delta` of `rounds` Gaussian releases of one `noise_multiplier` together."""
    return float(gaussian.epsilon(noise_multiplier / math.sqrt(rounds), delta))


def found_noises(stack: Stack) -> list[tuple[AskedEpsilon, float]]:
    """Returns (asked ε, noise multiplier) of each defense of a calibrated stack that asks."""
    return [
        (one.target, float(one.model_dump()["noise_multiplier"]))
        for one in stack.training_defenses
        if one.target
    ]


def calibrate_noise(written: Stack, account: Account, place: str) -> Stack:
    """Returns `written` with the least noise that keeps the worst client's ε to the one asked for.

    The noise depends on public facts alone: whoever knows these finds the same, to the last digit.
    If no ε is asked for, `written` stays as it is. A FedsimError about the key `place` says that
    the ε cannot be reached, or has another δ than the ledger.
    """
    if not asked_epsilons(written):
        return written
    with blaming(place):
        target = _only_target(written, account.scenario.privacy.delta)
        entries = account.entries(written, account.scenario.training.rounds)
        reason: str | None = None

        def epsilon_of(multiplier: float) -> float:
            nonlocal reason
            stack, found = _with_noise(written, multiplier), 0.0
            for entry in entries:
                # With `known`, the ledger may answer for a client that is not worst by a bound.
                stated = claim(stack, account.declared, replace(entry, known=found))
                found, reason = max(found, stated.epsilon), stated.reason
                if found > target.epsilon:
                    break  # too little noise, whatever the others spend
            return found

        try:
            return _with_noise(written, least_noise(epsilon_of, target.epsilon))
        except FedsimError as error:
            if reason is None:
                raise
            raise FedsimError(
                f"epsilon: {target.epsilon:g} cannot be promised: {reason}"
            ) from error


def _only_target(stack: Stack, delta: float) -> AskedEpsilon:
    """Returns the ε that one defense of `stack` asks for, at the ledger's `delta`."""
    target, *others = asked_epsilons(stack)
    if others:
        raise FedsimError(
            "two defenses ask for an ε, and the claim is one of the whole stack; declare the "
            "noise of one of them"
        )
    if target.delta not in (None, delta):
        raise FedsimError(
            f"delta: {target.delta:g}, and the ledger states ε at privacy.delta, which is "
            f"{delta:g}; make them the same, or leave this one out"
        )
    return target


def _with_noise(stack: Stack, multiplier: float) -> Stack:
    """Returns `stack` whose defense that asks for an ε has this noise."""
    defenses = tuple(
        one.with_noise(multiplier) if one.target else one for one in stack.training_defenses
    )
    return replace(stack, training_defenses=defenses)


@dataclass(frozen=True)
class Account:
    """Counts what clients are asked for over the rounds, whatever the noise.

    `declared` is the local training before the stack's training defenses. `held` has the number of
    examples of each client, 0 where it is not known.
    """

    scenario: Scenario
    schedule: Schedule
    declared: LocalTraining
    held: Sequence[int]

    def entries(self, stack: Stack, rounds: int, *, probes: bool = True) -> list[Entry]:
        """Returns ledger entries after `rounds`, `probes` included or not; one has the worst ε."""
        scenario = self.scenario
        known = [count for count in self.held if count] or self.held
        counts = worst_client_sizes(stack.training(self.declared), known)
        return [
            Entry(
                rounds=most.trained,
                repeated_rounds=most.repeated,
                repeats=scenario.observe.releases,
                num_examples=count,
                delta=scenario.privacy.delta,
                schedules=self.public(rounds, stack),
                probes=self._list_probed(most.probed) if probes else (),
            )
            # Which pair is worst depends on the accountant, so each is accounted.
            for most, count in product(self.most(rounds), counts)
        ]

    def participations(self, round: int) -> set[tuple[int, ...]]:
        """Returns each set of rounds, from 1, that some client takes part in up to `round`."""
        rounds: dict[int, list[int]] = {}
        for past in range(1, round + 1):
            for client in self.schedule.round(past).participants:
                rounds.setdefault(client, []).append(past)
        return set(map(tuple, rounds.values()))

    def public(self, round: int, stack: Stack) -> set[tuple[bool, ...]]:
        """Returns, for all clients, whether each takes part in each of the rounds 1 to `round`.

        Clients with the same rounds share a tuple. The set is empty unless the stack's server adds
        noise, whose accounting needs this.
        """
        if not isinstance(stack.aggregation, NoisyAggregation):
            return set()
        return {
            tuple(past in each for past in range(1, round + 1))
            for each in self.participations(round)
        }

    def most(self, round: int) -> list[Most]:
        """Returns the largest counts after `round` rounds, in descending order.

        No other client's counts equal or exceed one of them in all three (`Most`). Every client
        counts as observed, and as probed even where it does not take part.
        """
        observed = self.schedule.is_observed
        sizes, again = self._sizes, self.scenario.observe.releases > 1
        probed = sum(observed(past) for past in range(1, round + 1) if sizes)
        counts = set()
        for rounds in self.participations(round):
            # Where probes are recorded, `releases` repeats these and not the training.
            repeated = sum(map(observed, rounds)) if again and not sizes else 0
            counts.add(Most(len(rounds) - repeated, repeated, probed))
        return [
            most
            # A client whose counts another one equals or exceeds cannot be worse.
            for most in sorted(counts, reverse=True)
            if not any(
                other != most
                and other.trained >= most.trained
                and other.repeated >= most.repeated
                and other.probed >= most.probed
                for other in counts
            )
        ] or [Most(0, 0, 0)]

    def _list_probed(self, rounds: int) -> tuple[ProbeReleases, ...]:
        """Returns what a client releases as probes in `rounds` rounds by size; () if uncounted."""
        observe = self.scenario.observe
        if self.scenario.privacy.probes != "included" or not rounds:
            return ()
        return tuple(
            ProbeReleases(
                declared=self.declared.as_probed(size),
                count=rounds * observe.trials,
                releases=observe.releases,
            )
            for size in self._sizes
        )

    def covers(self, round: int, probes: bool) -> str:
        """Describes in words what the ε after `round` rounds covers, as `training of 3 rounds`."""
        observe = self.scenario.observe
        covers = f"training of {number_of(round, 'round')}"
        asked = self.most(round)[0].probed * len(self._sizes)
        if asked and probes:
            count = asked * observe.trials * observe.releases
            counted = self.scenario.privacy.probes == "included"
            told = f" and {number_of(count, 'probe release')}"
            covers += told if counted else ", probes declared outside of the deployment"
        return covers

    @property
    def _sizes(self) -> list[int]:
        """Sizes of the batches of probes; empty if training itself is recorded."""
        return list(self.scenario.observe.batch_sizes or [])


@dataclass(frozen=True, order=True)
class Most:
    """Counts what one client released; `trained` counts rounds of training released once."""

    trained: int
    repeated: int
    """Number of rounds in which its training was released several times."""
    probed: int
    """Number of rounds in which it was asked for probes."""
