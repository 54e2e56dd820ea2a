"""Sets the page's content for paper, for whoever judges a deployment without running it.

Beside what the page shows stands what a judge asks for: numbered attackers, attacks that were not
tried, criteria of the EDPB's Opinion 28/2024, and the hashes and commands that repeat each number.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, cast

import yaml
from markupsafe import Markup

from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack, unreadable
from fedsim.recording.files import write_bytes, write_text
from fedsim.report.content import Content
from fedsim.report.facts import again
from fedsim.report.figures import (
    NO_DIFFERENTIAL_PRIVACY,
    describe_stack,
    format_bound,
    format_delta,
    format_epsilon,
    read_texts,
)
from fedsim.report.judge import WEAK_EPSILON
from fedsim.report.page import read_style, render
from fedsim.report.row import LeaderboardRow
from fedsim.report.threat import WATCHERS, is_own, threat_model_of, unknown_grants
from fedsim.report.utility import UtilityRow, utility
from fedsim.results.lines import ResultRow, nested
from fedsim.results.reading import RESULTS, StoredRun, load_runs
from fedsim.system import paths
from fedsim.types import FedsimError, Payload, watcher_of
from fedsim.words import number_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge")
"""Commands of the browsers that can print a page without a window."""
_SECONDS = 120
"""Time that a browser has to print."""


def write_dossier(
    folder: Path | str, out: Path | str | None = None, *, pdf: bool = False
) -> list[Path]:
    """Writes `dossier.html` of a run, or of all variants of a sweep, and with `pdf` prints it.

    The same run gives the same page, byte for byte: it holds no time but what the run has recorded.
    `out` is the folder to write to, by default `folder`. Returns the paths of the files.

    Raises:
        FedsimError: `folder` holds no results, a file in it is damaged, or `pdf` is asked for and
            no browser is installed that prints.
    """
    target = Path(out) if out else Path(folder)
    page, printed = target / "dossier.html", target / "dossier.pdf"
    browser = next((path for path in map(which, BROWSERS) if path), None)
    if pdf and browser is None:
        raise FedsimError(
            f"--pdf: none of {', '.join(BROWSERS)} is installed: leave --pdf out, open {page} in"
            " any browser and print it to a file"
        )
    write_text(page, dossier_of(load_runs([folder]), Path(folder)))
    if not pdf or browser is None:
        return [page]
    _print_page(page, printed, browser)
    return [page, printed]


def dossier_of(runs: Sequence[StoredRun], root: Path) -> str:
    """Returns the dossier of `runs`, which were read below the folder `root`.

    It fetches nothing and has no script.
    """
    content = Content(runs)
    rows, results = content.rows, content.results

    def local(text: str) -> str:
        """Names runs by their folders' names, wherever they lie."""
        for run in runs:
            text = text.replace(str(run.folder), run.folder.name)
        return text

    descriptions = [str(text) for run in runs if (text := run.setting("description"))]
    threats = {row.threat for row in rows}
    return render(
        "dossier.html.j2",
        content,
        style=Markup(read_style()),  # noqa: S704 - files of this package
        local=local,
        descriptions=list(dict.fromkeys(" ".join(text.split()) for text in descriptions)),
        ended=all(run.ended for run in runs),
        system=[(run, system_facts(run)) for run in runs],
        stacks=_stacks(runs, results),
        source=SOURCE,
        coverage=coverage(results),
        secrets=sorted({secret for row in rows for secret in row.knowledge.from_truth()}),
        unknown=sorted(
            {entry for each in threats for entry in unknown_grants(each) if not is_own(entry)}
        ),
        tried=list_tried(results),
        untried=list_untried(results, runs),
        unobserved=_list_unobserved(results, runs),
        guarantees=guarantees(runs),
        measured=criteria(content),
        whole=_whole_commands(runs, root),
        commands_of=numbered_commands(rows, runs, root),
        hashes=hashes,
        check=check_command(runs[0].folder.name) if runs else (),
    )


def _print_page(page: Path, printed: Path, browser: str) -> None:
    with TemporaryDirectory() as profile:
        options = ["--headless", "--disable-gpu", "--no-pdf-header-footer"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # Browsers refuse their sandbox to root. The page has no script and fetches nothing.
            options.append("--no-sandbox")
        draft = Path(profile) / "dossier.pdf"
        command = [browser, *options, f"--user-data-dir={profile}", f"--print-to-pdf={draft}"]
        try:
            done = subprocess.run(  # noqa: S603  # the browser that this machine has
                [*command, page.resolve().as_uri()],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
            said = done.stderr.strip()[-300:]
        except subprocess.TimeoutExpired:
            said = f"no answer within {_SECONDS} s"
        if not draft.exists():
            raise FedsimError(f"--pdf: {browser} printed nothing: {said}: print {page} yourself")
        write_bytes(printed, paths.content(draft, paths.TEXT))


def _stacks(runs: Sequence[StoredRun], rows: Sequence[ResultRow]) -> list[tuple[str, str]]:
    """Returns the members of each defense in words, as scenarios or else rows state them."""
    stated = {k: v for run in runs for k, v in (run.setting("defenses") or {}).items()}
    stated = stated or {row.defense.name: row.defense.stack for row in rows}
    return [(name, describe_stack(stack)) for name, stack in stated.items()]


_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "data": ("data", "source"),
    "partition": ("data", "partition"),
    "clients": ("data", "clients"),
    "model": ("model",),
    "learner": ("learner",),
    "algorithm": ("training", "algorithm"),
    "rounds": ("training", "rounds"),
    "local training": ("training", "local"),
    "strategy": ("federation", "strategy"),
    "participation": ("federation", "participation"),
    "engine": ("federation", "engine"),
    "seed": ("seed",),
}
"""What the dossier names of a scenario -> where it is set."""


def system_facts(run: StoredRun) -> list[tuple[str, str]]:
    """Returns names and values of what the scenario of `run` sets."""

    def describe(value: Any) -> str:
        if not isinstance(value, dict):
            return str(value)
        named = "name" in value
        return describe_stack([value]) if named else ", ".join(f"{k}={v}" for k, v in value.items())

    values = {name: run.setting(*path) for name, path in _SETTINGS.items()}
    return [(name, describe(value)) for name, value in values.items() if value not in (None, {})]


# The attackers that the literature numbers A to H, and which of them were measured.

SOURCE = (
    "Carletti, Foggia, Mazzocca, Parrella and Vento, SoK: Gradient Inversion Attacks in Federated "
    "Learning, USENIX Security 2025"
)


class Attacker(NamedTuple):
    """Describes one numbered attacker."""

    letter: str
    name: str
    has: str
    exceeded_by: str
    """Letters of those who can do all that it can."""
    unmeasured: str
    """Why a run does not measure it."""


class Coverage(NamedTuple):
    """Says whether a run has measured a numbered attacker, and how that is known."""

    attacker: Attacker
    extent: Literal["measured", "within", "not measured"]
    """`within`: not measured itself, and a measured attacker can do all that it can."""
    reason: str


def _letter_of(row: ResultRow) -> str:
    """Returns the numbered attacker of `row`; empty for a closed-form release.

    Every attacker here knows how clients train, and is granted the rest by the scenario. Other data
    of the same kind may also be an attack's own (its parameter `public`, of a generator).
    """
    if row.main.asked_singly:
        return ""
    if threat_model_of(row).malicious:
        return "G" if _has_surrogate(row) else "F"
    # Global running statistics are part of the model that everybody receives.
    if row.knowledge.bn in ("inferred", "exact"):
        return "E"
    return "D" if _has_surrogate(row) else "C"


def _has_surrogate(row: ResultRow) -> bool:
    return row.knowledge.public != "none" or bool(row.attack.brought)


def coverage(rows: Sequence[ResultRow]) -> list[Coverage]:
    """Returns what the scored `rows` cover of each numbered attacker, in their order."""
    return [_cover(Attacker(**stated), rows) for stated in read_texts()["attackers"]]


def _cover(attacker: Attacker, rows: Sequence[ResultRow]) -> Coverage:
    own = [row for row in rows if _letter_of(row) == attacker.letter]
    if own:
        reason = number_of(len(own), "attack run")
        if attacker.letter == "E" and not any(map(_has_surrogate, own)):
            reason += ", none of them with other data of the same kind"
        return Coverage(attacker, "measured", reason)
    if stronger := sorted({_letter_of(row) for row in rows} & set(attacker.exceeded_by)):
        reason = (
            f"whoever has this can run no attack that {stronger[0]} cannot; how much less it "
            "recovers was not measured"
        )
        return Coverage(attacker, "within", reason)
    return Coverage(attacker, "not measured", attacker.unmeasured)


# Which attacks a run has tried, and which of the installed ones it has not.


class Tried(NamedTuple):
    """Describes one attack over all its trials."""

    label: str
    summary: str
    """What it does; empty where the plugin is not installed here."""
    parameters: str
    ok: int
    n: int
    seconds: float | None
    """Mean of a trial."""


def list_tried(rows: Sequence[ResultRow]) -> list[Tried]:
    """Returns the attacks of `rows`, each once, in their order."""
    known = {plugin.name: plugin.summary for plugin in plugins.list_installed("fedsim.attacks")}
    attacks = []
    for label in dict.fromkeys(row.attack.label for row in rows):
        trials = [row for row in rows if row.attack.label == label]
        attack = trials[0].attack
        own = {
            "name": attack.name,
            **_non_defaults("fedsim.attacks", attack.name, attack.parameters),
        }
        restarts = f", {attack.restarts} restarts" * (attack.restarts > 1)
        seconds = [row.cost.seconds for row in trials if row.cost and row.cost.seconds is not None]
        attacks.append(
            Tried(
                label,
                known.get(attack.name, ""),
                describe_stack([own]) + restarts,
                sum(row.ok for row in trials),
                len(trials),
                sum(seconds) / len(seconds) if seconds else None,
            )
        )
    return attacks


def _non_defaults(group: str, name: str, parameters: dict[str, object]) -> dict[str, object]:
    """Returns the parameters of a plugin that are not at their defaults.

    All are returned if the plugin is not installed here, and so its defaults are not known.
    """
    plugin = next((each for each in plugins.list_installed(group) if each.name == name), None)
    if plugin is None or plugin.cls is None:
        return parameters
    defaults = {p.name: p.default for p in plugin.parameters if not p.required}
    return {
        key: value
        for key, value in parameters.items()
        if key not in defaults or defaults[key] != value
    }


def list_untried(
    rows: Sequence[ResultRow], runs: Sequence[StoredRun] = ()
) -> list[tuple[str, str, str]]:
    """Returns (name, summary, reason) of the installed attacks that none of `rows` is of."""
    names = {row.attack.name for row in rows}
    due = {
        entry.get("name")
        for run in runs
        if not run.ended
        for entry in run.setting("attacks") or []
        if isinstance(entry, dict)
    }
    return [
        (
            plugin.name,
            plugin.summary,
            "the run has not come to it" if plugin.name in due else _reason(plugin, rows),
        )
        for plugin in plugins.list_installed("fedsim.attacks")
        if plugin.name not in names
    ]


def _reason(plugin: plugins.Installed, rows: Sequence[ResultRow]) -> str:
    """Returns why an attack that fits no recording of `rows`, or was not named, was not tried."""
    if plugin.error is not None:
        return f"it cannot be loaded here: {plugin.error}"
    cls = plugin.cls
    assert cls is not None and issubclass(cls, Attack)
    released = {cast("Payload", (row.release or {}).get("kind", "update")) for row in rows}
    for payload in sorted(released):
        why = unreadable(plugin.name, cls.reads, payload)
        if why and not released & set(cls.reads):
            return why
    lacks = [row.knowledge.lacks(cls.needs) for row in rows]
    if lacks and all(lacks):
        return f"it {lacks[0]}"
    required = [parameter.name for parameter in plugin.parameters if parameter.required]
    if required:
        return (
            f"the scenario does not name it; it needs {' and '.join(required)}, which only its "
            "user can give"
        )
    return "the scenario does not name it; whether it fits this system was not checked"


def _list_unobserved(rows: Sequence[ResultRow], runs: Sequence[StoredRun]) -> list[str]:
    """Words which vantages, clients and rounds nobody looked at."""
    views = {"client": "another participant", "eavesdropper": "somebody on the wire"}
    vantages = {row.vantage for row in rows}
    lines = [
        f"What {who} sees was not attacked."
        for vantage, who in views.items()
        if vantage not in vantages
    ]
    for run in runs[:1]:
        clients, rounds = run.setting("data", "clients"), run.setting("training", "rounds")
        attacked = {row.client for row in rows if row.client >= 0}
        if isinstance(clients, int) and attacked:
            lines.append(
                f"{len(attacked)} of {number_of(clients, 'client')} were attacked on their own."
            )
        looked = sorted({row.round for row in rows})
        if isinstance(rounds, int):
            lines.append(
                f"Updates of {len(looked)} of {number_of(rounds, 'round')} were attacked "
                f"({', '.join(map(str, looked))})."
            )
    return lines


# What is proven of each defense, and under which assumptions.

_LARGEST = 700.0
"""exp of more is beyond the largest double."""


def guarantees(runs: Sequence[StoredRun]) -> tuple[list[str], list[str]] | None:
    """Returns a sentence for each guarantee and one on audits, and the assumptions of all.

    It is None where no round of training is recorded.
    """
    rows = utility(runs)
    if not rows:
        return None
    sentences = [_promise(row) for row in rows]
    if audits := [audit for run in runs for audit in run.audits]:
        methods = ", ".join(sorted({audit.method.replace("_", " ") for audit in audits}))
        sentences.append(
            f"Audits ({methods}) give a lower bound of ε from canaries. One that stays below the "
            "claim does not prove the claim."
        )
    else:
        sentences.append("No claim was audited in this run.")
    return sentences, _assumptions(runs, rows)


def _promise(row: UtilityRow) -> str:
    """Words one guarantee, or what its absence means, and what an audit found."""
    name = f"{row.defense} ({row.variant})" if row.variant else row.defense
    if row.epsilon is None:
        return f"{name}: no guarantee was accounted."
    if math.isinf(row.epsilon):
        why = f" ({row.reason})" if row.reason else ""
        return (
            f"{name}: nothing is proven{why}. What attacks failed to find here, another attack "
            "may find."
        )
    unit = row.unit or "unit that is not stated"
    relations = read_texts()["relations"]
    relation = relations.get(row.relation, "a relation that is not stated")
    factor = format_epsilon(math.exp(min(row.epsilon, _LARGEST)))
    delta = f"but for a chance of {format_delta(row.delta)}" if row.delta else "and δ is not stated"
    text = (
        f"{name}: the odds of any conclusion about one {unit} change by a factor of at most "
        f"{factor} (exp ε), {delta}. Neighbouring data: {relation.format(unit=unit)}."
    )
    if row.epsilon >= WEAK_EPSILON:
        text += " That is next to no promise."
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        text += " This is no differential privacy in the usual sense."
    if row.audited_epsilon is not None:
        refutes = "REFUTES" if row.audited_epsilon > row.epsilon else "does not refute"
        text += (
            f" An audit shows that at least ε = {format_bound(row.audited_epsilon)} is spent: it "
            f"{refutes} the claim."
        )
    return text


def _assumptions(runs: Sequence[StoredRun], rows: Sequence[UtilityRow]) -> list[str]:
    lines = [
        "Every client runs the declared defense as it is written, and the server does not receive "
        "anything else from it.",
        "The number of examples of each client is public.",
        "What a client computes with (classes, image size, normalization) is declared, and was not "
        "computed from clients’ data.",
        "The split into training and test data precedes the deployment.",
    ]
    if any(run.setting("privacy", "probes") == "outside" for run in runs):
        lines.append(
            "The probes of this measurement are declared no part of the deployment, and are not "
            "counted in ε."
        )
    if any(run.setting("privacy", "weights") == "public" for run in runs):
        lines.append("The weights that training starts from are declared to be public.")
    noise = [str(text) for run in runs if (text := nested(run.record, "notes", "noise"))]
    if any(row.epsilon is not None and math.isfinite(row.epsilon) for row in rows):
        lines += [f"{text[:1].upper()}{text[1:]}." for text in dict.fromkeys(noise)]
    return lines


def criteria(content: Content) -> dict[str, str]:
    """Returns what was measured of each criterion of the EDPB's Opinion 28/2024 that was.

    The opinion (adopted on 17 December 2024) is about trained models: one is anonymous only if it
    is insignificantly likely that personal data are extracted from it, directly or by queries.
    """
    rows, runs = content.rows, content.runs
    attacks, left_out = list_tried(content.results), list_untried(content.results, runs)
    not_tried = f" {number_of(len(left_out), 'installed attack')} not tried." if left_out else ""
    watchers = dict.fromkeys(WATCHERS.get(watcher_of(row.vantage), row.vantage) for row in rows)
    seconds = [attack.seconds for attack in attacks if attack.seconds is not None]
    machines = [
        str(name)
        for run in runs
        for part in ("gpu", "processor")
        if (name := nested(run.record, "environment", part))
    ]
    sources = dict.fromkeys(
        str(name) for run in runs if (name := run.setting("data", "source", "name"))
    )
    proven = [
        f"{row.defense}: ε = {format_epsilon(row.epsilon)}{f' per {row.unit}' * bool(row.unit)}"
        for row in utility(runs)
        if row.epsilon is not None and math.isfinite(row.epsilon)
    ]
    trials = sorted({row.n for row in rows}) or [0]
    return {
        "means": f"{number_of(len(attacks), 'attack')} of published kinds.{not_tried}",
        "context": f"What is seen by {' and by '.join(watchers)}."
        if watchers
        else "Nobody’s view.",
        "information": _information(rows),
        "cost": (
            f"An attack took {min(seconds):.3g} to {max(seconds):.3g} s on average for one update, "
            f"on {machines[0] if machines else 'a machine that is not recorded'}."
            if seconds
            else "The time of attacks was not recorded."
        ),
        "data": f"The data source {', '.join(sources)} and the" if sources else "The",
        "design": f"{'; '.join(proven)} (chapter 7)." if proven else "No defense has a finite ε.",
        "membership": _membership(rows),
        "reconstruction": _reconstruction(rows),
        "trials": " to ".join(map(str, dict.fromkeys((trials[0], trials[-1])))),
    }


def _information(rows: Sequence[LeaderboardRow]) -> str:
    granted = sorted({secret for row in rows for secret in row.knowledge.from_truth()})
    others = sorted({entry for row in rows for entry in row.threat.beyond} - set(granted))
    parts = ["The attacker knows the model, its weights and how clients train."]
    if others:
        among = all(set(others) <= set(row.threat.beyond) for row in rows)
        has = "It also has" if among else "In part it also has"
        parts.append(f"{has} what no honest server has by itself ({', '.join(others)}).")
    if granted:
        parts.append(
            f"In part it is given what only the victim knows ({', '.join(granted)}): an upper "
            "bound."
        )
    return " ".join(parts)


def _membership(rows: Sequence[LeaderboardRow]) -> str:
    told = [(area.mean, row.threat) for row in rows if (area := row.metrics["membership_auc"])]
    if not told:
        return "Not measured in this run."
    areas, models = [area for area, _ in told], {threat for _, threat in told}
    over = f", over {number_of(len(models), 'threat model')} (chapter 6)" if len(models) > 1 else ""
    return f"AUC {min(areas):.2f} to {max(areas):.2f} (a coin: 0.50){over}."


def _reconstruction(rows: Sequence[LeaderboardRow]) -> str:
    gained = [row for row in rows if row.gain is not None]
    if not gained:
        return "Not measured in this run."
    victims = number_of(max(row.images or 0 for row in gained), gained[0].main.singular)
    return f"Measured on up to {victims} for each attack and defense (chapter 6)."


# How each number is repeated, and the hashes by which its files are known again.

_FILES = ("scenario.yaml", RESULTS, "rounds.jsonl", "audit.jsonl", "record.json")
_RECORDED = (".json", ".safetensors")
_CHUNK = 1 << 20

Command = tuple[str, ...]
"""Parts of a command, one a line."""


def numbered_commands(
    rows: Sequence[LeaderboardRow], runs: Sequence[StoredRun], root: Path
) -> list[tuple[str, Command]]:
    """Returns (title, command) for each attack on each defense, numbered C1, C2 and so on.

    A command repeats all batch sizes and rounds. There is none of a deployment, whose nodes belong
    to others, and of a run that lost its scenario. Folders are named from beside `root`.
    """
    titles: dict[Command, str] = {}
    for row in rows:
        for run in runs:
            command = _command(row, run, root)
            if command and command not in titles:
                titles[command] = f"C{len(titles) + 1}: {row.attack} on {row.defense}"
    return [(title, command) for command, title in titles.items()]


def _command(row: LeaderboardRow, run: StoredRun, root: Path) -> Command | None:
    stack = (run.setting("defenses") or {}).get(row.defense)
    entries = [
        entry
        for entry in run.setting("attacks") or []
        if isinstance(entry, dict) and entry.get("label", entry.get("name")) == row.attack
    ]
    is_of_run = any(result.cell == row.cell for result in run.rows)
    if run.is_remote or stack is None or not is_of_run or not entries:
        return None
    defenses = {row.defense: [_shorten_entry("fedsim.defenses", member) for member in stack]}
    attacks = [_shorten_entry("fedsim.attacks", entry) for entry in entries]
    return (
        _with_scenario("fedsim run scenario.yaml --out again", run, root),
        f"--set {shlex.quote(f'defenses={_as_yaml(defenses)}')}",
        f"--set {shlex.quote(f'attacks={_as_yaml(attacks)}')}",
    )


def _whole_commands(runs: Sequence[StoredRun], root: Path) -> list[tuple[str, Command]]:
    """Returns the command that repeats each run whose scenario is kept."""
    commands: list[tuple[str, Command]] = []
    for run in runs:
        if run.scenario_text is not None:
            command = again([run]).command
            command += "" if "--out" in command else " --out again"
            title = _name(run, root) if len(runs) > 1 else "Everything in this dossier"
            commands.append((title, (_with_scenario(command, run, root),)))
    return commands


def _with_scenario(command: str, run: StoredRun, root: Path) -> str:
    """Returns a command whose scenario is that of `run`."""
    return command.replace("scenario.yaml", shlex.quote(f"{_name(run, root)}/scenario.yaml"))


def _name(run: StoredRun, root: Path) -> str:
    """Names a run's folder as seen from the one that holds `root`, with `/` between its parts."""
    here = root.resolve()
    return run.folder.resolve().relative_to(here.parent).as_posix() if here.name else "."


def _shorten_entry(group: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a plugin's entry in a scenario without what is at its default."""
    usual = {"label": entry["name"], "restarts": 1}
    stated = {k: v for k, v in entry.items() if k in usual and v != usual[k]}
    own = {k: v for k, v in entry.items() if k not in ("name", *usual)}
    return {"name": str(entry["name"]), **stated, **_non_defaults(group, str(entry["name"]), own)}


def _as_yaml(value: object) -> str:
    """Writes YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=1 << 30, sort_keys=False, allow_unicode=True
    )
    return text.strip()


def hashes(run: StoredRun) -> list[tuple[str, str]]:
    """Returns the SHA-256 of a run's files, and one of all its recordings: (name, digest).

    That of the recordings is of the lines that `sha256sum` prints of each, in the order of their
    paths.
    """
    digests = [(name, _sha256(path)) for name in _FILES if (path := run.folder / name).is_file()]
    for part in ("observations", "reconstructions"):
        files = {
            path.relative_to(run.folder).as_posix(): path
            for path in (run.folder / part).rglob("*")
            if path.suffix in _RECORDED and path.is_file()
        }
        if files:
            lines = "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))
            digest = hashlib.sha256(lines.encode()).hexdigest()
            digests.append((f"{part}/ ({len(files)} files)", digest))
    return digests


def check_command(name: str) -> Command:
    """Returns the command that prints the digest of a run's recordings, in parts.

    `name` is the run's folder, from where the command is run.
    """
    return (
        f"cd {shlex.quote(name)} && find observations -name '*.json' -o -name '*.safetensors' |",
        "LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum",
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with paths.open_regular(path, paths.ARCHIVE) as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()
