"""Makes lines of `rounds.jsonl`, `results.jsonl` and `audit.jsonl`; null is what does not apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedsim.attacking.jobs import Job, Result
from fedsim.audit import audited_epsilon
from fedsim.federation.records import SILENT, RoundRecord
from fedsim.privacy import membership
from fedsim.privacy.recovery import mean_limit, success_limit
from fedsim.results.lines import ResultRow, describe_tensor_bound
from fedsim.results.reading import fits
from fedsim.results.record import Row, read_lines
from fedsim.scenario import Scenario
from fedsim.targets.membership import FALSE_POSITIVES, LOW_RATES, accused_others
from fedsim.training.accounting import account_of as account_of
from fedsim.training.accounting import claim_for_drawn
from fedsim.training.accounting import claim_of as claim_of
from fedsim.training.accounting import spent as spent
from fedsim.training.accounting import spent_by as spent_by
from fedsim.training.server import Server
from fedsim.training.workload import Workload
from fedsim.types import Observation, PrivacyClaim, watcher_of

_UTILITY = ("train_loss", "test_loss", "test_accuracy", "test_examples", "test_chance")
Key = tuple[str, str, str]
"""(stack, attack label, observation id)."""


def audit_row(
    workload: Workload, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Row | None:
    """Audits the workload's stack by canaries, and returns its line of `audit.jsonl`.

    This trains the federation anew, perhaps often. The result is None if the scenario asks for no
    audit, or the stack claims nothing. `on_progress` is called with the steps done and all steps.
    An audit that its training does not fit is a FedsimError.
    """
    audit, last = workload.scenario.audit, workload.scenario.training.rounds
    taken = account_of(workload).participations(last)
    # Canaries take part in the training, and probes are not asked of them.
    claim = spent(workload, last, probes=False)
    if audit is None or claim.unit is None:
        return None
    found = audited_epsilon(workload, claim, audit, taken=taken, on_progress=on_progress)
    return {
        "defense": workload.stack_name,
        **audit.model_dump(),
        "unit": claim.unit,
        "relation": claim.relation,
        "delta": claim.delta,
        "epsilon": number(claim.epsilon),
        "audited_epsilon": found,
        "holds": found <= claim.epsilon,
    }


def round_row(server: Server, result: RoundRecord) -> Row:
    """Returns the line of `rounds.jsonl` for `result`; its ε covers all rounds up to that one."""
    fields = asdict(result)
    claimed = spent_by(server, result.round)
    examples, chance = server.test_set()
    return {
        "defense": server.stack_name,
        "round": fields.pop("round"),
        **fields,
        "test_examples": examples,
        "test_chance": chance,
        "epsilon": number(claimed.epsilon),
        "privacy": _privacy(claimed),
        "sigma": _row_noise(server),
    }


def _row_noise(server: Server) -> float | None:
    """Returns σ, where a client appends the rows of σ I to its data; else None."""
    defense, release = server.stack.data_defense, server.release
    return defense.sigma(release) if defense and release else None


@dataclass(frozen=True)
class Context:
    """Holds what lines of `results.jsonl` of one run have in common, or share by stack.

    `variant` has the swept keys and values, `rounds` all lines of `rounds.jsonl`, and `servers` the
    server of each stack, all rounds trained.
    """

    scenario: Scenario
    variant: Mapping[str, Any]
    servers: Mapping[str, Server]
    rounds: Sequence[Row]
    audited: Mapping[str, float]
    """Stack -> lower bound of its ε, by canaries; stacks that were not audited are missing."""

    def row(self, job: Job, result: Result) -> ResultRow:
        """Returns the line of one attack on one observation, without a control (`add_controls`)."""
        seen = result.observation
        stack = seen.id.partition("/")[0]
        own = [row for row in self.rounds if row["defense"] == stack]
        # Utility is the final model's; the cost is that of the attacked round.
        last = max(own, key=lambda row: int(row["round"]))
        attacked = next(row for row in own if row["round"] == seen.round)
        server = self.servers[stack]
        guarantee = claim_of(server, seen)
        # `guarantee` is the claim for this release alone, `whole` for all that the watcher sees.
        whole = spent(server, self.scenario.training.rounds, seen_from=seen.vantage)
        return ResultRow.of(
            job,
            result,
            scenario=self.scenario.name,
            variant=dict(self.variant),
            dataset=self.scenario.data.source.name,
            learner=self.scenario.learner.name,
            **_spec(seen),
            knowledge=self.scenario.knowledge.model_dump(),
            theory={
                **describe_tensor_bound(result),
                **(
                    _membership_limits(guarantee)
                    if seen.payload != "update"
                    else _update_limits(server, result)
                ),
                **_recovery_limits(server, result),
            },
            utility={
                **{name: last[name] for name in _UTILITY},
                "local_losses": result.local_losses and [number(x) for x in result.local_losses],
            },
            privacy={
                **_privacy(guarantee),
                "noise_key": "scenario" if server.noise_seed is None else "node",
                "audited_epsilon": self.audited.get(stack),
                "run": _privacy(whole),
            },
            cost={**result.cost, "bytes_up": _per_client(attacked)},
        )


def _privacy(claim: PrivacyClaim) -> Row:
    return {**asdict(claim), "epsilon": number(claim.epsilon)}


def key(row: Row) -> Key:
    """Returns (stack, attack label, observation id): what identifies a result `row` in a run."""
    return row["defense"]["name"], row["attack"]["label"], row["observation"]


def order(scenario: Scenario) -> Callable[[Row], tuple[Any, ...]]:
    """Returns a sort key for results: by the scenario's order of defenses, attacks, vantages.

    Batch size, round, client and trial follow. The key of another scenario's line is a ValueError.
    """
    stacks = list(scenario.defenses)
    labels = [entry.label or entry.name for entry in scenario.attacks]
    watchers: list[str] = list(scenario.observe.vantages)

    def position(row: Row) -> tuple[Any, ...]:
        return (
            stacks.index(row["defense"]["name"]),
            labels.index(row["attack"]["label"]),
            watchers.index(watcher_of(row["vantage"])),
            row["batch_size"],
            row["round"],
            row["client"],
            row["trial"],
        )

    return position


def _spec(seen: Observation) -> Row:
    parameters = dict(seen.spec.parameters)
    if seen.payload == "update":
        return {"model": {"name": seen.model.name, "parameters": parameters}}
    return {"release": {"kind": seen.payload, "parameters": parameters}}


def _membership_limits(guarantee: PrivacyClaim) -> dict[str, float | None]:
    """Returns the largest AUC and TPR of membership that the claim allows; None if it says none."""
    epsilon, delta = guarantee.epsilon, guarantee.delta
    # Only under this relation do the two worlds differ in one row's presence.
    if guarantee.relation != "add_or_remove" or delta is None:
        return {"membership_auc": None, "membership_tpr": None}
    return {
        "membership_auc": membership.auc_limit(epsilon, delta),
        "membership_tpr": membership.tpr_limit(epsilon, delta, FALSE_POSITIVES),
    }


def _update_limits(server: Server, result: Result) -> dict[str, float | None]:
    """Returns the largest shares of members that the claim for all rounds seen allows."""
    shares = [f"membership_tpr_at_{ending}" for ending in LOW_RATES]
    found: dict[str, float | None] = dict.fromkeys(("membership_auc", "membership_tpr", *shares))
    others, seen = result.metrics.get("membership_others"), result.observation
    if others is None:
        return found
    claim = spent(server, seen.round, seen_from=seen.vantage)
    # In batches of one size, an absent example would let another one in.
    sampled = server.training.sizes_vary
    if claim.delta is None or claim.reason is not None:
        return found
    bounded = membership.row_claim(
        claim.unit, claim.relation, claim.epsilon, claim.delta, sampled=sampled
    )
    if bounded is None:
        return found
    found["membership_auc"] = membership.auc_limit(*bounded)
    rates = dict(zip(shares, LOW_RATES.values(), strict=True))
    members, levels = int(result.metrics.get("membership_members") or 0), []
    for name, rate in {"membership_tpr": FALSE_POSITIVES, **rates}.items():
        if not (accused := accused_others(int(others), rate)):
            continue
        # The threshold is estimated from these others, and its true rate may be above `rate`.
        certain = membership.certain_rate(accused, int(others))
        found[name] = membership.tpr_limit(*bounded, certain)
        if (told := result.metrics.get(name)) is not None:
            counted = round(told * members), members, accused, int(others)
            levels.append(membership.share_p_value(*counted, *bounded))
    if levels:
        # Bonferroni: the claim is refuted if it is at any of the rates.
        found["membership_p"] = min(1.0, len(levels) * min(levels))
    return found


_NEIGHBOURS = ("replace_one", "zero_out", "add_or_remove")
"""Relations under which one unit is exchanged for any other, or for none."""


def _recovery_limits(server: Server, result: Result) -> dict[str, float | str | None]:
    """Returns the largest means that the claim allows any attack, of metrics with a prior."""
    if reason := _why_unlimited(server, result):
        return {"limit_reason": reason}
    claims = claim_for_drawn(server, result.observation)
    first = claims[0]
    if first.reason is not None:
        return {"limit_reason": first.reason}
    if first.relation not in _NEIGHBOURS:
        return {"limit_reason": f"the ε is of data that are {first.relation}, not of any example"}
    # All pairs of ε and δ hold at once, and the least limit of them is taken.
    curve = [(each.epsilon, each.delta or 0.0) for each in claims]
    found: dict[str, float | str | None] = {
        name: mean_limit(
            each.levels,
            # The best of several answers has at most the sum of their chances.
            [min(1.0, each.answers * chance) for chance in each.chances],
            lambda chance: success_limit(chance, curve),
        )
        for name, each in result.chances.items()
    }
    candidates = max(each.candidates for each in result.chances.values())
    found["limit_prior"] = f"one of {candidates} public images, each as likely"
    found["limit_unit"] = first.unit
    return found


def _why_unlimited(server: Server, result: Result) -> str | None:
    """Returns why theory limits no attack here, before any claim is asked for; None if it may."""
    granted, observe = server.scenario.knowledge, server.scenario.observe
    # A known label is part of the prior.
    told = [name for name in granted.from_truth() if not name.startswith("labels=")]
    cases = {
        "no noise is added": not result.observation.effect.noise,
        f"the attacker was granted what only the victim knows: {', '.join(told)}": bool(told),
        "the probe is declared outside of what ε covers": bool(observe.batch_sizes)
        and server.scenario.privacy.probes != "included",
        "no prior is known of what the attack is after": not result.chances,
    }
    return next((why for why, is_so in cases.items() if is_so), None)


def number(value: float) -> float | str:
    """Returns `value`, or `"inf"` where it is infinite or NaN, since JSON has no such number."""
    return value if math.isfinite(value) else "inf"


def _per_client(row: Row) -> int | None:
    # Answers that were read and then left out are among the bytes.
    answered = len(row["participants"]) - sum(row["failures"].get(why, 0) for why in SILENT)
    return row["bytes_up"] // answered if answered else None


_RESULT_KEYS = {"metrics", "baseline", "reason", "per_image", "theory", "cost"}


def refuse_foreign_rows(
    out: Path, keys: Collection[Key], stacks: Collection[str], last: int
) -> None:
    """Raises a FedsimError if a folder holds lines that are damaged, or of other runs.

    Args:
        out: Folder of the run.
        keys: `key` of each result that the run is to have.
        stacks: Names of the run's defense stacks.
        last: Number of its last round.
    """

    def result(row: Row) -> bool:
        # Refused now, since controls and report read these keys of every row at the run's end.
        is_complete = isinstance(row["control"], dict) and row.keys() >= _RESULT_KEYS
        return is_complete and key(row) in keys and fits(row, "results.jsonl")

    def round(row: Row) -> bool:
        is_of_run = row["defense"] in stacks and row["round"] in range(1, last + 1)
        is_complete = row.keys() >= {field.name for field in fields(RoundRecord)}
        return is_of_run and is_complete and fits(row, "rounds.jsonl")

    def audit(row: Row) -> bool:
        return row["defense"] in stacks and fits(row, "audit.jsonl")

    read_lines(out / "results.jsonl", result)
    read_lines(out / "rounds.jsonl", round)
    read_lines(out / "audit.jsonl", audit)
