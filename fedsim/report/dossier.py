"""Sets the page's content for paper, for whoever judges a deployment without running it."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, cast

from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack, unreadable
from fedsim.recording.files import write_bytes, write_text
from fedsim.report.content import Content
from fedsim.report.facts import again, utility
from fedsim.report.figures import describe_stack, read_texts
from fedsim.report.page import render
from fedsim.report.row import LeaderboardRow
from fedsim.report.threat import WATCHERS, is_own, threat_model_of, unknown_grants
from fedsim.results.lines import ResultRow, nested
from fedsim.results.reading import RESULTS, StoredRun, load_runs
from fedsim.system import paths
from fedsim.types import FedsimError, Payload, watcher_of
from fedsim.words import number_of

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge")
"""Commands of the browsers that can print a page without a window."""
_SECONDS = 120


def write_dossier(
    folder: Path | str, out: Path | str | None = None, *, pdf: bool = False
) -> list[Path]:
    """Writes `dossier.html` of a run, or of a sweep, and returns the paths, the page's first.

    `out` is the folder to write to, made if missing, by default `folder`. If `pdf`, an installed
    browser prints `dossier.pdf`, too. The same run gives the same page, byte for byte. A
    FedsimError says that `folder` holds no results, that a file in it is damaged, or that no
    browser is installed for `pdf`, or prints nothing.
    """
    target = Path(out) if out else Path(folder)
    page, printed = target / "dossier.html", target / "dossier.pdf"
    browser = next((path for path in map(which, _BROWSERS) if path), None)
    if pdf and browser is None:
        raise FedsimError(
            f"--pdf: none of {', '.join(_BROWSERS)} is installed: leave --pdf out, open {page} in"
            " any browser and print it to a file"
        )
    write_text(page, dossier_of(load_runs([folder]), Path(folder)))
    if not pdf or browser is None:
        return [page]
    _print_page(page, printed, browser)
    return [page, printed]


def dossier_of(runs: Sequence[StoredRun], root: Path) -> str:
    """Returns `runs` in or below `root` as an HTML dossier; a damaged answer is a FedsimError."""
    content = Content(runs)
    rows, results = content.rows, content.results

    def local(text: str) -> str:
        for run in runs:
            text = text.replace(str(run.folder), run.folder.name)
        return text

    descriptions = [str(text) for run in runs if (text := run.setting("description"))]
    threats = {row.threat for row in rows}
    noise = [str(text) for run in runs if (text := nested(run.record, "notes", "noise"))]
    stacks = {k: v for run in runs for k, v in (run.setting("defenses") or {}).items()}
    # Without any scenario the rows state what the stacks were.
    stacks = stacks or {row.defense.name: row.defense.stack for row in results}
    return render(
        "dossier.html.j2",
        content,
        local=local,
        descriptions=list(dict.fromkeys(" ".join(text.split()) for text in descriptions)),
        ended=all(run.ended for run in runs),
        stacks=[(name, describe_stack(stack)) for name, stack in stacks.items()],
        source=_SOURCE,
        coverage=_coverage(results),
        secrets=sorted({secret for row in rows for secret in row.knowledge.from_truth()}),
        unknown=sorted(
            {entry for each in threats for entry in unknown_grants(each) if not is_own(entry)}
        ),
        tried=_list_tried(results),
        untried=_list_untried(results, runs),
        probes_outside=any(run.setting("privacy", "probes") == "outside" for run in runs),
        public_weights=any(run.setting("privacy", "weights") == "public" for run in runs),
        noise=list(dict.fromkeys(noise)) if _has_finite_claim(runs) else [],
        audits=sorted({each.method.replace("_", " ") for run in runs for each in run.audits}),
        measured=_criteria(content),
        commands_of=_list_commands(runs, root),
        hashes=_hashes,
        check=_check_command(runs[0].folder.name) if runs else "",
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


_SOURCE = (
    "Carletti, Foggia, Mazzocca, Parrella and Vento, SoK: Gradient Inversion Attacks in Federated "
    "Learning, USENIX Security 2025"
)


class _Coverage(NamedTuple):
    """Says whether a run has measured one of the attackers that `_SOURCE` names A to H."""

    letter: str
    name: str
    has: str
    extent: Literal["measured", "within", "not measured"]
    """`within`: not measured itself, and a measured attacker can do all that it can."""
    reason: str


def _letter_of(row: ResultRow) -> str:
    """Returns the numbered attacker of `row`; empty for a closed-form release."""
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


def _coverage(rows: Sequence[ResultRow]) -> list[_Coverage]:
    """Returns, for each attacker in the order of letters, whether the scored `rows` cover it."""
    found = []
    for stated in read_texts()["attackers"]:
        own = [row for row in rows if _letter_of(row) == stated["letter"]]
        # Of those who can do all that this attacker can, one that was measured.
        stronger = sorted({_letter_of(row) for row in rows} & set(stated["exceeded_by"]))
        extent: Literal["measured", "within", "not measured"] = "not measured"
        reason = stated["unmeasured"]
        if own:
            extent, reason = "measured", number_of(len(own), "attack run")
            if stated["letter"] == "E" and not any(map(_has_surrogate, own)):
                reason += ", none of them with other data of the same kind"
        elif stronger:
            extent = "within"
            reason = (
                f"whoever has this can run no attack that {stronger[0]} cannot; how much less it "
                "recovers was not measured"
            )
        found.append(_Coverage(stated["letter"], stated["name"], stated["has"], extent, reason))
    return found


def _list_tried(rows: Sequence[ResultRow]) -> list[tuple[str, str, int, int]]:
    """Returns (label, summary, trials with an answer, all trials) of each attack in `rows`."""
    known = {plugin.name: plugin.summary for plugin in plugins.list_installed("fedsim.attacks")}
    trials: dict[str, list[ResultRow]] = {}
    for row in rows:
        trials.setdefault(row.attack.label, []).append(row)
    return [
        (label, known.get(own[0].attack.name, ""), sum(row.ok for row in own), len(own))
        for label, own in trials.items()
    ]


def _list_untried(
    rows: Sequence[ResultRow], runs: Sequence[StoredRun] = ()
) -> list[tuple[str, str, str]]:
    """Returns (name, summary, reason) of each installed attack without a row; `runs` tell why."""
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


def _has_finite_claim(runs: Sequence[StoredRun]) -> bool:
    return any(row.epsilon is not None and math.isfinite(row.epsilon) for row in utility(runs))


def _criteria(content: Content) -> dict[str, str]:
    """Maps the criteria of the EDPB's Opinion 28/2024 (of trained models) to what was measured."""
    rows, runs = content.rows, content.runs
    tried = number_of(len(_list_tried(content.results)), "attack")
    left_out = _list_untried(content.results, runs)
    not_tried = f" {number_of(len(left_out), 'installed attack')} not tried." if left_out else ""
    watchers = dict.fromkeys(WATCHERS.get(watcher_of(row.vantage), row.vantage) for row in rows)
    seconds = [row.seconds for row in rows if row.seconds is not None]
    proven, trials = _has_finite_claim(runs), sorted({row.n for row in rows}) or [0]
    gained = [row for row in rows if row.gain is not None]
    images = max((row.images or 0 for row in gained), default=0)
    return {
        "means": f"{tried} of published kinds.{not_tried}",
        "context": f"What is seen by {' and by '.join(watchers) or 'nobody'}.",
        "information": _information(rows),
        "cost": f"An attack took {min(seconds):.3g} to {max(seconds):.3g} s on average for one "
        "update, on the hardware of chapter 10."
        if seconds
        else "The time of attacks was not recorded.",
        "design": "The ε of chapter 7." if proven else "No defense has a finite ε.",
        "membership": _membership(rows),
        "reconstruction": f"Measured on up to {number_of(images, gained[0].main.singular)} for "
        "each attack and defense (chapter 6)."
        if gained
        else "Not measured in this run.",
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


_FILES = ("scenario.yaml", RESULTS, "rounds.jsonl", "audit.jsonl", "record.json")
_RECORDED = (".json", ".safetensors")


def _list_commands(runs: Sequence[StoredRun], root: Path) -> list[tuple[str, str]]:
    """Returns (title, shell command that repeats it from above `root`) for each kept scenario."""
    commands: list[tuple[str, str]] = []
    here = root.resolve()
    for run in runs:
        if run.scenario_text is not None:
            # The run's folder as seen from the one that holds `root`, with `/` between its parts.
            folder = run.folder.resolve()
            name = folder.relative_to(here.parent).as_posix() if here.name else "."
            command = again([run]).command
            command += "" if "--out" in command else " --out again"
            title = name if len(runs) > 1 else "Everything in this dossier"
            own = shlex.quote(f"{name}/scenario.yaml")
            commands.append((title, command.replace("scenario.yaml", own)))
    return commands


def _hashes(run: StoredRun) -> list[tuple[str, str]]:
    """Returns (name, SHA-256) of a run's files, and of what `sha256sum` prints of its folders."""
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


def _check_command(name: str) -> str:
    """Returns the shell command that prints the digest of recordings in the run's folder `name`."""
    return (
        f"cd {shlex.quote(name)} && find observations -name '*.json' -o -name '*.safetensors' | "
        "LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    )


def _sha256(path: Path) -> str:
    with paths.open_regular(path, paths.ARCHIVE) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
