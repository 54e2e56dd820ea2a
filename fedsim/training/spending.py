"""Counts what clients release over the rounds, and finds the noise that keeps to an asked ε.

How much a client holds is known from the census, and it is taken to be public.
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
    """Returns the ε of each defense of `stack`, in order, that declares one in place of a noise."""
    return [one.target for one in stack.training_defenses if one.target]


def epsilon_of_rounds(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Returns the exact ε at `delta` of `rounds` >= 1 Gaussian releases of the same data together.

    `noise_multiplier` is the noise's standard deviation over the L2 sensitivity of one release.
    A FedsimError refuses a negative one, and a `delta` not in (0, 1).
    """
    return float(gaussian.epsilon(noise_multiplier / math.sqrt(rounds), delta))


def found_noises(stack: Stack) -> list[tuple[AskedEpsilon, float]]:
    """Returns (asked ε, noise multiplier) of all that ask, in order, after `calibrate_noise`."""
    return [
        (one.target, float(one.model_dump()["noise_multiplier"]))
        for one in stack.training_defenses
        if one.target
    ]


def calibrate_noise(written: Stack, account: Account, place: str) -> Stack:
    """Returns `written` with the least noise that keeps each client's ε to the one asked for.

    The noise depends on public facts alone: whoever knows these finds the same, to the last digit.

    Args:
        written: Stack as the scenario writes it; returned as it is if no defense asks for an ε.
        account: Counts of the releases over all rounds.
        place: Key of the scenario that error messages blame, as `defenses.dp[0]`.

    Raises:
        FedsimError: the ε cannot be reached, is for another δ than `privacy.delta`, or two
            defenses ask for one.
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
    defenses = tuple(
        one.with_noise(multiplier) if one.target else one for one in stack.training_defenses
    )
    return replace(stack, training_defenses=defenses)


@dataclass(frozen=True)
class Account:
    """Counts what clients release over the rounds, whatever the noise."""

    scenario: Scenario
    schedule: Schedule
    declared: LocalTraining
    """Local training before the stack's training defenses."""
    held: Sequence[int]
    """Number of training examples of each client, by its number; 0 where it is not known."""

    def entries(self, stack: Stack, rounds: int, *, probes: bool = True) -> list[Entry]:
        """Returns the releases, after `rounds`, of each client that may have the largest ε.

        `stack` is the one whose ε is asked for. Answers to probes count if `probes`, unless
        `privacy.probes` is `outside`. The caller has to add what does not depend on rounds:
        `buffers_released`, `release`, `private_statistics` and `unprotected`.
        """
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
        """Returns each set of ascending rounds, of 1 to `round`, that some client takes part in."""
        rounds: dict[int, list[int]] = {}
        for past in range(1, round + 1):
            for client in self.schedule.round(past).participants:
                rounds.setdefault(client, []).append(past)
        return set(map(tuple, rounds.values()))

    def public(self, round: int, stack: Stack) -> set[tuple[bool, ...]]:
        """Returns the sets of `participations` as one flag for each of the rounds 1 to `round`.

        It is empty unless the server adds the stack's noise, whose accounting alone needs it.
        """
        if not isinstance(stack.aggregation, NoisyAggregation):
            return set()
        return {
            tuple(past in each for past in range(1, round + 1))
            for each in self.participations(round)
        }

    def most(self, round: int) -> list[Most]:
        """Returns the counts of the clients that released the most, in descending order.

        Counts that another client's equal or exceed in all three fields of `Most` are left out.
        Every client counts as observed and probed. After 0 rounds it is one `Most(0, 0, 0)`.
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
        """Describes what the ε after `round` rounds covers, as `training of 3 rounds`.

        If `probes`, it also says how many answers to probes count, or that none does.
        """
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
    """Counts the rounds in which one client released something."""

    trained: int
    """Number of rounds in which its training update was released once."""
    repeated: int
    """Number of rounds in which it was released several times, `observe.releases`."""
    probed: int
    """Number of rounds in which it was asked for probes."""
