"""Auditing a defense stack inside its federation: canaries take part, or they do not.

The claim of a stack holds of any data, so the auditor chooses the worst that it can make, which
goes through the code that clients run, noise included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fedsim.audit import one_run, two_worlds
from fedsim.audit.bounds import one_run_bound, two_world_bounds
from fedsim.privacy import ledger
from fedsim.scenario.model import Audit
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, PrivacyClaim, Relation, Unit

_AUDITED: tuple[tuple[Unit, Relation], ...] = (
    ("client", "zero_out"),
    ("example", "replace_one"),
    ("example", "zero_out"),
)
"""(unit, relation) of the claims that can be audited: there is a canary for them."""


def check(audit: Audit, claims: Mapping[str, PrivacyClaim], clients: int) -> None:
    """Refuses, by a FedsimError, an audit that could show nothing of some stack's claim.

    `claims` has each stack's by its name, and `clients` is the number of clients. At least one
    claim has to be finite, and each that is has to hide a client under `zero_out`, or an example
    under `replace_one` or `zero_out`. In one run, there may be at most 10,000 canaries, and claims
    on clients need 20 clients or more.
    """
    proven = {name: claim for name, claim in claims.items() if claim.unit is not None}
    if not proven:
        raise FedsimError(
            "audit: no stack of defenses has a privacy claim that an audit could refute; add one "
            "that has, or leave audit out"
        )
    if audit.method == "one_run" and audit.canaries > _MOST:
        raise FedsimError(
            f"audit.canaries: {audit.canaries} in one run compare more contributions than memory "
            f"holds; use at most {_MOST}, which show an ε of up to 7.7"
        )
    for name, claim in proven.items():
        if (claim.unit, claim.relation) not in _AUDITED:
            raise FedsimError(
                f"audit: there is no canary for the claim of {name}, per {claim.unit} under "
                f"{claim.relation}; leave audit out"
            )
        if audit.method == "one_run" and claim.unit == "client" and clients < _LEAST_CLIENTS:
            raise FedsimError(
                f"audit.method: the claim of {name} is one of whole clients, of which {clients} in "
                f"one run show too little; use two_worlds, or data.clients of {_LEAST_CLIENTS} or "
                "more"
            )


_MOST = 10_000
"""Most canaries in one run: twice as many rows are compared, each with each."""

_LEAST_CLIENTS = 20
"""Fewest clients of one run: with all their coins guessed, they refute an ε of 1.5 at 99%."""


def audited_epsilon(
    workload: Workload,
    claim: PrivacyClaim,
    audit: Audit,
    *,
    taken: Collection[tuple[int, ...]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Computes a lower bound of the stack's ε at the claim's δ, by an audit; 0 refutes nothing.

    Above the claim's ε the bound refutes the claim with the audit's confidence; below, it proves
    nothing. For Gaussian noise without sampling, two worlds may give a bound on the ε of Gaussian
    claims (μ-GDP) alone. Elsewhere the bound is that of any (ε, δ) claim.

    Args:
        workload: the federation.
        claim: what is tried; it has passed `check`.
        audit: the scenario's method, canaries and confidence.
        taken: for each client the numbers of the rounds that it takes part in, from 1; not used by
            the method `one_run`.
        on_progress: called with (done, total) trainings of the canary, or rounds of one run.

    Errors are those of `one_run.scores`, or `two_worlds.scores`.
    """
    assert claim.unit is not None
    assert claim.relation is not None
    assert claim.delta is not None
    if audit.method == "one_run":
        told, coins = one_run.scores(
            workload, claim.unit, claim.relation, audit.canaries, on_progress
        )
        return one_run_bound(told, coins, delta=claim.delta, confidence=audit.confidence).epsilon
    absent, present = two_worlds.scores(
        workload, claim.unit, claim.relation, taken, audit.canaries, on_progress
    )
    # Only of these claims is the trade-off curve Gaussian, as `gaussian_bound` presumes.
    gaussian = claim.accountant in (ledger.EXACT, ledger.OF_SERVER)
    found = two_world_bounds(
        absent, present, delta=claim.delta, confidence=audit.confidence, gaussian=gaussian
    )
    return max(bound.epsilon for bound in found)
