"""How each number is repeated, and the hashes by which its files are known again."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsim.report.dossier.attempts import changed
from fedsim.report.facts import again
from fedsim.report.row import LeaderboardRow
from fedsim.results.reading import RESULTS, Run
from fedsim.system import paths

_FILES = ("scenario.yaml", RESULTS, "rounds.jsonl", "audit.jsonl", "record.json")
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """Holds the command that repeats one attack on one defense, at all batch sizes and rounds."""

    number: str
    defense: str
    attack: str
    words: tuple[str, ...]

    @property
    def title(self) -> str:
        """Says what it repeats."""
        return f"{self.number}: {self.attack} on {self.defense}"


def numbered(lines: Sequence[LeaderboardRow], runs: Sequence[Run], root: Path) -> list[Numbered]:
    """Returns each command that repeats some of `lines` once, numbered C1, C2 and so on."""
    found: dict[tuple[str, ...], Numbered] = {}
    for line in lines:
        for words in of_line(line, runs, root):
            if words not in found:
                found[words] = Numbered(
                    number=f"C{len(found) + 1}",
                    defense=line.defense,
                    attack=line.attack,
                    words=words,
                )
    return list(found.values())


def whole(runs: Sequence[Run], root: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the command that repeats each run whose scenario is kept."""
    return [
        (
            _name(run, root) if len(runs) > 1 else "Everything in this dossier",
            _with_scenario(_into_folder(again([run]).command), run, root),
        )
        for run in runs
        if run.scenario_text is not None
    ]


def of_line(line: LeaderboardRow, runs: Sequence[Run], root: Path) -> list[tuple[str, ...]]:
    """Returns the command that repeats one attack on one defense, for each run that it is from.

    Nothing is returned for a deployment, whose nodes belong to others, and for a run that lost its
    scenario.
    """
    commands = []
    for run in runs:
        stack = (run.setting("defenses") or {}).get(line.defense)
        if run.is_remote or stack is None:
            continue
        if not any(row.cell == line.cell for row in run.rows):
            continue
        entries = [
            entry
            for entry in run.setting("attacks") or []
            if isinstance(entry, dict) and entry.get("label", entry.get("name")) == line.attack
        ]
        if not entries:
            continue
        defenses = {line.defense: [_short("fedsim.defenses", member) for member in stack]}
        attacks = [_short("fedsim.attacks", entry) for entry in entries]
        commands.append(
            (
                *_with_scenario("fedsim run scenario.yaml --out again", run, root),
                f"--set {shlex.quote(f'defenses={_flow(defenses)}')}",
                f"--set {shlex.quote(f'attacks={_flow(attacks)}')}",
            )
        )
    return commands


def _into_folder(command: str) -> str:
    return command if "--out" in command else f"{command} --out again"


def _with_scenario(command: str, run: Run, root: Path) -> tuple[str, ...]:
    """Splits a command into words, its scenario being that of `run`."""
    scenario = shlex.quote(f"{_name(run, root)}/scenario.yaml")
    return tuple(scenario if word == "scenario.yaml" else word for word in command.split(" "))


def _name(run: Run, root: Path) -> str:
    """Names a run's folder as seen from the one that holds `root`, with `/` between its parts."""
    here = root.resolve()
    return run.folder.resolve().relative_to(here.parent).as_posix() if here.name else "."


def _short(group: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plugin's entry in a scenario without what is at its default."""
    name = str(entry["name"])
    own = {k: v for k, v in entry.items() if k not in ("name", "label", "restarts")}
    label, restarts = entry.get("label", name), entry.get("restarts", 1)
    return {
        "name": name,
        **({"label": label} if label != name else {}),
        **({"restarts": restarts} if restarts != 1 else {}),
        **changed(group, name, own),
    }


def _flow(value: object) -> str:
    """Writes YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=1 << 30, sort_keys=False, allow_unicode=True
    )
    return text.strip()


def hashes(run: Run) -> list[tuple[str, str]]:
    """Returns the SHA-256 of a run's files, and one of all its recordings: (name, digest).

    That of the recordings is of the lines that `sha256sum` prints of each, in the order of their
    paths.
    """
    found = [(name, _sha256(path)) for name in _FILES if (path := run.folder / name).is_file()]
    for part in ("observations", "reconstructions"):
        files = {
            path.relative_to(run.folder).as_posix(): path
            for path in (run.folder / part).rglob("*")
            if path.suffix in _RECORDED and path.is_file()
        }
        if files:
            lines = "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))
            digest = hashlib.sha256(lines.encode()).hexdigest()
            found.append((f"{part}/ ({len(files)} files)", digest))
    return found


_RECORDED = (".json", ".safetensors")


def check_command(name: str) -> tuple[str, ...]:
    """Returns the command that prints the digest of a run's recordings, in parts."""
    return (
        f"cd {shlex.quote(name)} &&",
        "find observations -name '*.json' -o -name '*.safetensors' |",
        "LC_ALL=C sort |",
        "xargs -d '\\n' sha256sum |",
        "sha256sum",
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with paths.opened(path, paths.ARCHIVE) as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()
