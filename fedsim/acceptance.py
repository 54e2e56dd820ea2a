"""Checks a scenario together with its data: before a run (`accept`), and alone (`validate`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim import federation, progress, scoring
from fedsim.data.images import public_examples
from fedsim.federation import refusals
from fedsim.federation.deployed import Deployed
from fedsim.federation.network.link import Link
from fedsim.scenario import Document, Scenario, Variant, expand, locate, open_document
from fedsim.system.device import resolve_device
from fedsim.system.threads import fix_within
from fedsim.training import accounting, spending
from fedsim.training.server import Server
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError, PrivacyClaim, Table
from fedsim.words import format_claim, number_of


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Holds what `accept` returns: one scenario with its loaded data, all checks of it passed."""

    scenario: Scenario
    variant: Mapping[str, Any]
    """Key path that the sweep assigns -> its value in this variant; empty without a sweep."""
    label: str
    """Name of the variant; empty without a sweep."""
    place: str
    """Prefix of stages' names: the variant's place in its sweep (`2/4 `); empty without a sweep."""
    deployed: Deployed | None
    """Facts about clients on other machines; None if clients run in this machine's processes."""
    servers: Mapping[str, Server]
    """Stack's name -> its `Workload` with all clients' data; if `deployed`, a `Server` without."""
    claims: Mapping[str, PrivacyClaim]
    """Stack's name -> privacy claim after all rounds, by the ledger."""

    def lines(self) -> list[str]:
        """Returns lines to print before a run: data, rounds, steps, probes, defended stacks' ε."""
        scenario = self.scenario
        first = next(iter(self.servers.values()))
        held, schedule = first.census.held, first.schedule
        of = first.described.noun
        counts = f"at least {number_of(min(held), of)}"
        # All rounds have as many participants; the first stands for them.
        taking = len(schedule.round(1).participants)
        lines = [
            f"data: {number_of(len(held), 'client')} each with {counts}, and "
            f"{number_of(first.test_set()[0], f'{of} to test on', f'{of}s to test on')}",
            f"rounds: {scenario.training.rounds:,}, each of {taking} of "
            f"{number_of(len(held), 'client')}",
        ]
        if federation.build_engine(scenario).remote:
            lines[0] += "; nodes with data of their own are asked for their counts by a run"
        lines += [*describe_left_out(first.described), *describe_near_copies(first)]
        if first.spec is not None:
            local = first.declared
            each = number_of(local.batch_size, of)
            lines.append(
                f"local training: {number_of(local.steps, 'step')} of {each}, "
                f"sampling {local.sampling}"
            )
        observe = scenario.observe
        if observe.batch_sizes:
            rounds = sum(map(schedule.is_observed, range(1, scenario.training.rounds + 1)))
            sizes = ", ".join(map(str, observe.batch_sizes))
            asked = rounds * len(observe.batch_sizes) * observe.trials * observe.releases
            lines.append(
                f"probes: {number_of(asked, 'release')} of each observed client, of batches of "
                f"{sizes} (in the ε: {scenario.privacy.probes})"
            )
        defended = [one for name, one in self.servers.items() if scenario.defenses[name]]
        return [*lines, *(describe_claim(one, self.claims[one.stack_name]) for one in defended)]


def describe_left_out(described: Dataset | Table) -> list[str]:
    """Returns one line on the files or columns that the data source did not use; empty for none."""
    if not described.left_out:
        return []
    total = sum(count for _, count in described.left_out)
    of = number_of(total, described.source_noun)
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in described.left_out)
    return [f"left out: {of} of the data source ({reasons})"]


def describe_near_copies(server: Server) -> list[str]:
    """Returns one line on observed clients' images that nearly copy public ones; empty for none."""
    if not isinstance(server, Workload) or not isinstance(server.dataset, Dataset):
        return []
    if server.dataset.columns:
        return []
    asked, held = server.scenario.observe.clients, server.dataset.train_images
    seen = [held[one.own] for one in server.clients if asked == "all" or one.number in asked]
    public = public_examples(server.dataset, server.scenario.seed)[0]
    count = sum(scoring.near_copies(images, public) for images in seen)
    # Only copies are judged here: ∞ public images for each guess are always enough.
    problem = scoring.guess_problem(len(public), math.inf, count)
    return [f"of what observed clients hold: {problem}"] if problem else []


def describe_claim(server: Server, claim: PrivacyClaim) -> str:
    """Returns one line on a stack's ε, the reason of an ∞, and noise found for a requested ε."""
    found = [
        f"noise_multiplier {multiplier:g} for epsilon {target.epsilon:g}, "
        for target, multiplier in spending.found_noises(server.stack)
    ]
    if claim.unit is None:
        return f"{server.stack_name}: {''.join(found)}ε = ∞: {claim.reason}"
    stated = format_claim(claim.epsilon, claim.delta, claim.unit, claim.relation)
    return f"{server.stack_name}: {''.join(found)}ε = {stated}, by {claim.accountant}"


def validate(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *,
    overrides: Sequence[str] = (),
    quiet: bool = True,
) -> list[Accepted]:
    """Checks everything that a run checks before its work, and writes nothing.

    The data are loaded, and at most two local steps are tried behind each stack. Nodes elsewhere
    are not asked: clients hold what the scenario's own source deals to them. The list has an entry
    for each variant of a sweep, in its order, and one without a sweep.

    Args:
        scenario: Path of a scenario file, its content as plain values, or a `Scenario`.
        overrides: `a.b=value` assignments to a file's keys; only a path takes them.
        quiet: Whether to show no progress of slow claims on the standard error.

    Raises:
        FedsimError: a run would refuse the scenario, for the reason that the message states.
    """
    document = open_scenario(scenario, overrides)
    variants = expand(document)
    with locate_errors(document):
        return [
            accept(variant, place_of(number, variants), quiet=quiet)
            for number, variant in enumerate(variants)
        ]


def open_scenario(
    scenario: str | Path | Mapping[str, Any] | Scenario, overrides: Sequence[str]
) -> Document | Mapping[str, Any] | Scenario:
    """Opens a scenario file with `overrides` (`a.b=value`); returns any other scenario as it is.

    A ScenarioError says what is wrong with a file or override, a FedsimError that there are
    overrides and no file.
    """
    if isinstance(scenario, str | Path):
        return open_document(scenario, overrides)
    if overrides:
        raise FedsimError("overrides apply to a scenario file; change the scenario itself instead")
    return scenario


@contextmanager
def locate_errors(document: Document | Mapping[str, Any] | Scenario) -> Iterator[None]:
    """Turns a FedsimError inside its `with` block into a ScenarioError that names the file.

    The line is named, too, if the message begins with a key path, such as `data.clients: `. If
    `document` is no `Document`, the error passes unchanged.
    """
    try:
        yield
    except FedsimError as error:
        raise locate(document, error) if isinstance(document, Document) else error from None


def place_of(index: int, variants: Sequence[Variant]) -> str:
    """Returns the prefix of a stage's name: `2/4 ` for index 1 of four; empty without a sweep."""
    return f"{index + 1}/{len(variants)} " if variants[index].label else ""


def accept(
    variant: Variant, place: str, *, quiet: bool, out: Path | None = None, link: Link | None = None
) -> Accepted:
    """Loads a variant's data, and checks everything about it.

    Nodes that are elsewhere are asked over `link` how many examples they hold. Nothing is written.

    Args:
        variant: The scenario, with the keys that a sweep assigns.
        place: Prefix of the names of stages, see `Accepted.place`.
        quiet: Whether to show no progress and no waiting for nodes on the standard error.
        out: The run's folder. If None, no node is asked: clients that are elsewhere count as
            holding what the scenario's own source deals.
        link: Way to the SuperLink. If None, an engine with nodes elsewhere reads from `out` what
            an earlier run learned of them.

    Raises:
        FedsimError: the scenario, its data or this machine do not allow the run.
    """
    scenario = variant.scenario
    # A device that is not there is refused before any data are loaded.
    resolve_device(scenario.device)

    def on_wait(there: int) -> None:
        if not quiet:
            wanted = number_of(scenario.data.clients, "node")
            print(f"waiting: {there} of {wanted} there", file=sys.stderr)

    with fix_within(scenario.threads):
        refusals.check_scenario(scenario)
        engine = federation.build_engine(scenario)
        deployed = engine.clients_of(scenario, out, link, on_wait) if out else None
        servers: dict[str, Server] = deployed.servers(scenario) if deployed else {}
        claims = {}
        # Loaded once, for all stacks.
        dataset = None if servers else load_dataset(scenario)
        for name in () if servers else scenario.defenses:
            title = f"{place}calibrate {name}"
            with progress.report_work(title, "the search for its noise", quiet):
                servers[name] = Workload(scenario, name, dataset)
        for name, server in servers.items():
            with progress.report_work(f"{place}account {name}", quiet=quiet):
                refusals.check(server)
                claims[name] = accounting.spent(server, scenario.training.rounds)
        refusals.check_run(scenario, servers, claims)
    return Accepted(
        scenario=scenario,
        variant=variant.assignment,
        label=variant.label,
        place=place,
        deployed=deployed,
        servers=servers,
        claims=claims,
    )
