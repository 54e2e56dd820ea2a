"""Computes what a stack's federation spends of privacy, after a round or by one release."""

from __future__ import annotations

from dataclasses import replace

from fedsim.contracts.defense import NoisyAggregation
from fedsim.contracts.stack import Stack
from fedsim.privacy.ledger import Entry, claim, worst_client_sizes
from fedsim.scenario.build import build_engine
from fedsim.training.server import Server
from fedsim.training.spending import Account, asked_epsilons
from fedsim.types import FedsimError, Observation, PrivacyClaim, Vantage


def spent(
    server: Server, round: int, *, probes: bool = True, seen_from: Vantage = "server"
) -> PrivacyClaim:
    """Returns the claim on all that clients released so far, for the client with the largest ε.

    Args:
        server: The federation.
        round: Number of rounds that are over.
        probes: Whether answers to probes count too; never if `privacy.probes` is `outside`.
        seen_from: `client` if a participant looks, who knows its own part of a combination. Any
            other view is that of the server.

    Errors are those of `fedsim.privacy.ledger.claim`.
    """
    account, stack = account_of(server), _accounted_stack(server, seen_from)
    worst: PrivacyClaim | None = None
    for entry in account.entries(server.stack, round, probes=probes):
        # The ledger may stop at a quick bound for a client that cannot be worse than this.
        known = worst.epsilon if worst else 0.0
        found = claim(stack, server.declared, replace(_with_set_up(server, entry), known=known))
        if worst is None or found.epsilon > worst.epsilon:
            worst = found
    assert worst is not None, "some client takes part, and all hold something"
    return _covering(server, worst, account.covers(round, probes))


def claim_of(server: Server, seen: Observation) -> PrivacyClaim:
    """Returns the claim on the releases in `seen` alone, for its client with the largest ε.

    It fails as `fedsim.privacy.ledger.claim`.
    """
    scenario, probing = server.scenario, bool(server.scenario.observe.batch_sizes)
    declared = server.declared
    if probing:
        declared = declared.as_probed(seen.training.batch_size)
    own, stack = [seen.client], _accounted_stack(server, seen.vantage)
    if seen.vantage in ("aggregate", "client"):
        # A mean is made of all others' data, so the claim is that of the worst of them.
        taking_part = server.plan(seen.round).participants
        own = [client for client in taking_part if client != seen.client]
    # A server's noise may be correlated over rounds, so the ledger is told which round this is.
    only = tuple(past == seen.round for past in range(1, scenario.training.rounds + 1))
    shared = isinstance(server.stack.aggregation, NoisyAggregation)
    again = seen.releases > 1
    entries = [
        Entry(
            rounds=int(not again),
            repeated_rounds=int(again),
            repeats=seen.releases,
            num_examples=held,
            delta=scenario.privacy.delta,
            schedules={only} if shared else (),
        )
        for held in worst_client_sizes(server.training, (server.census.held[one] for one in own))
    ]
    kind = "probe" if probing else "training update"
    claims = [claim(stack, declared, _with_set_up(server, entry)) for entry in entries]
    covers = f"this {kind}" + (f", released {seen.releases} times" if again else "")
    return _covering(server, max(claims, key=lambda claim: claim.epsilon), covers)


def _with_set_up(server: Server, entry: Entry) -> Entry:
    return replace(
        entry,
        buffers_released=server.releases_statistics,
        release=server.release,
        private_statistics=server.census.private_statistics,
        unprotected=server.unprotected,
    )


_DELTAS = (1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Further δ of a curve of claims: rare guesses behind little noise are bounded best at a large
one."""


def claim_for_drawn(server: Server, seen: Observation) -> list[PrivacyClaim]:
    """Returns claims for an example that is known to be in the batch of `seen`.

    The first is at `privacy.delta`, 13 others are at rising δ from 1e-6 to 0.97, each for the
    client with the largest ε. All releases up to the round of `seen` count, without amplification
    by sampling. It fails as `fedsim.privacy.ledger.claim`.
    """
    account, stack = account_of(server), _accounted_stack(server, seen.vantage)
    entries = [
        replace(_with_set_up(server, entry), drawn=True)
        for entry in account.entries(server.stack, seen.round)
    ]
    return [
        max(
            (claim(stack, server.declared, replace(entry, delta=delta)) for entry in entries),
            key=lambda found: found.epsilon,
        )
        for delta in (server.scenario.privacy.delta, *_DELTAS)
    ]


def spent_by(server: Server, round: int) -> PrivacyClaim:
    """Returns a valid claim after `round` >= 1 rounds, as `spent` does, and perhaps a larger ε.

    If batches are sampled at random sizes, it is the claim after the least power of two of rounds
    that is not below `round`, or after all rounds if that is more than there are.
    """
    sampled = server.training.sizes_vary
    # The ε after a later round is no smaller, so it is valid here. Powers of two keep slow
    # accounting rare.
    later = 1 << (round - 1).bit_length() if sampled else round
    return spent(server, min(later, server.scenario.training.rounds))


def check_promise(server: Server) -> None:
    """Refuses, by a FedsimError, a stack that asks for a smaller ε than it has after all rounds."""
    if not (asked := asked_epsilons(server.stack)):
        return
    claimed = spent(server, server.scenario.training.rounds)
    least = min(asked, key=lambda target: target.epsilon)
    if claimed.epsilon > least.epsilon:
        said = claimed.reason or f"the ledger states {claimed.epsilon:g}"
        delta = server.scenario.privacy.delta if least.delta is None else least.delta
        # A claim of ε = ∞ names no unit; the mechanism that was asked for it does.
        mechanism = server.stack.guarantees(server.declared, server.release)[-1].mechanism
        promised = f"{least.epsilon:g} at δ = {delta:g}"
        promised += f" per {mechanism.unit}" if mechanism else ""
        raise FedsimError(
            f"defenses.{server.stack_name}: epsilon: {promised} cannot be promised: {said}"
        )


def _accounted_stack(server: Server, seen_from: Vantage = "server") -> Stack:
    """Returns the defenses between a client's data and whoever looks from `seen_from`."""
    aggregation = server.stack.aggregation
    # A participant sees the combination in any case, and knows what it added itself.
    if seen_from == "client" and aggregation:
        # Every round has equally many participants.
        participants = len(server.plan(1).participants)
        return replace(server.stack, aggregation=aggregation.seen_by_one_of(participants))
    # A deployment's server computes a sum itself, and so has what each client releases.
    remote = build_engine(server.scenario.federation.engine).remote
    if remote and not isinstance(aggregation, NoisyAggregation):
        return replace(server.stack, aggregation=None)
    return server.stack


def account_of(server: Server) -> Account:
    """Returns the account that counts what clients of `server` release over the rounds."""
    return Account(server.scenario, server.schedule, server.declared, server.census.held)


def _covering(server: Server, claim: PrivacyClaim, releases: str) -> PrivacyClaim:
    """Returns `claim` as one that covers `releases`, under the condition that it named, if any."""
    claimed, federation = claim.claimed_epsilon, server.scenario.federation
    if claimed is None and federation.budget is not None:
        reason = f"{federation.strategy} adds its noise after the server has seen each update"
        claim = replace(
            claim, claimed_epsilon=federation.budget, reason=reason if claim.reason else None
        )
    return replace(claim, covers=f"{releases}, if {claim.covers}" if claim.covers else releases)
