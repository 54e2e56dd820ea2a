"""Keeps a run's record on disk: rows that survive a kill, and what was run where."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsim.recording.files import naming, write_bytes, write_json
from fedsim.system import paths
from fedsim.types import FedsimError, Observation

if TYPE_CHECKING:
    from fedsim.attacking.jobs import Job

Row = dict[str, Any]


def append_line(path: Path, row: Row) -> None:
    """Appends `row` as one JSON line, forced to disk; makes the file's folder.

    NaN or infinity in it is a ValueError, a file that cannot be written an OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("ab") as file:
        file.write(_line(row))
        file.flush()
        # A result may have taken hours: it outlives a crash of the machine as well.
        os.fsync(file.fileno())


def read_lines(path: Path, belongs: Callable[[Row], bool] = bool) -> list[Row]:
    """Returns the rows of a JSON-lines file in order, without a last line that a kill cut short.

    The list is empty if there is no file. `belongs` says of a row whether the file may hold it, or
    raises ValueError, KeyError or TypeError; by default every row but an empty one belongs. A
    FedsimError says that a line is damaged, or holds a row that does not belong there.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(
        paths.content(path, paths.LINES).splitlines(keepends=True), start=1
    ):
        # Only the last line can lack its end: a kill cut it, and its work is done again.
        if not line.endswith(b"\n"):
            continue
        try:
            row = strict_json(line)
            valid = isinstance(row, dict) and belongs(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise FedsimError(
                f"{path}, line {number}: damaged, or of another run; remove the line to have its "
                "work done again"
            )
        rows.append(row)
    return rows


def strict_json(line: bytes | str) -> Any:
    """Returns the value of a JSON text (bytes: UTF-8); NaN and infinity in it are a ValueError.

    So are other text, a float beyond the largest double and an unpaired surrogate. A text that is
    nested too deeply is a RecursionError.
    """
    text = line if isinstance(line, str) else line.decode()
    value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    # Encoding fails on half a character; texts without such escapes need no check.
    if _HALF.search(text):  # of a whole one, too
        json.dumps(value, ensure_ascii=False).encode()
    return value


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Pattern of an escaped surrogate: half a character of UTF-16."""


def describe_fault(error: Exception) -> str:
    """Returns the text of an error; of a ValidationError of pydantic its first fault and place."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}"


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a JSON-lines file by `rows`, atomically; NaN or infinity in one is a ValueError."""
    write_bytes(path, b"".join(_line(row) for row in rows))


def drop_torn_line(path: Path) -> None:
    """Removes a last line without a line break; a FedsimError if another is damaged then."""
    if not path.exists():
        return
    with paths.open_regular(path, paths.LINES) as file:
        # The last byte tells: rewriting a long file for nothing would take its time.
        file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
        last = file.read(1)
    if last != b"\n":
        write_lines(path, read_lines(path))


def environment() -> Row:
    """Returns this machine's part of `record.json`, with None where something is not known.

    Keys are `python`, `platform`, `processor`, `cores`, `gpu`, `packages` (versions) and `commit`.
    """
    import torch

    packages = ("fedsim", "torch", "torchvision", "flwr", "numpy", "scipy", "scikit-image", "lpips")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "packages": {name: _version(name) for name in packages},
        "commit": _commit(),
    }


CONTROL = "control"
"""Name of a run's subfolder of updates of public images (`controls`), which no client made."""


def files_of(folder: Path, pattern: str) -> list[Path]:
    """Returns sorted paths, at any depth of `folder`, of glob `pattern`; none below a `control`."""
    found = sorted(folder.rglob(pattern))
    return [path for path in found if CONTROL not in path.relative_to(folder).parts]


@dataclass(frozen=True)
class Run:
    """Gives access to a finished run's folder, `out`, as `fedsim.run` returns it."""

    out: Path

    def rows(self) -> list[Row]:
        """Returns the lines of `results.jsonl`, of every variant of a sweep, by path of the file.

        Lines of failed attacks are among them: see `status`. A damaged line is a FedsimError.
        """
        return [row for path in files_of(self.out, "results.jsonl") for row in read_lines(path)]

    def rounds(self) -> list[Row]:
        """Returns the lines of `rounds.jsonl`, of every variant of a sweep, as `rows` does."""
        return [row for path in files_of(self.out, "rounds.jsonl") for row in read_lines(path)]

    def observations(self) -> list[Path]:
        """Returns the recordings of what the server saw, for `fedsim.load_observation`.

        Those of clients come first, then those of aggregates, each sorted by path: by variant,
        stack, round and client.
        """
        # What the server saw: `participant-*` and `wire-*` are of other vantages.
        kinds = ("client", "aggregate")
        return [
            path for kind in kinds for path in files_of(self.out, f"observations/**/{kind}-*.json")
        ]

    @property
    def report(self) -> Path:
        """Path of the HTML report."""
        return self.out / "report.html"


def _line(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    # Most Linux systems leave `processor` empty, so that it is asked last.
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Returns the commit of the running source tree (`+` if changed since); None for a package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def ask(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        done = subprocess.run(  # noqa: S603 - fixed arguments
            command, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        return ask("rev-parse", "HEAD") + ("+" if ask("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


PLAN = "plan.json"

Line = tuple[str, str, str, int, int]
"""Identifies a leaderboard line of a run: (defense, attack, vantage, batch size, round)."""

Count = Annotated[int, Field(ge=0, lt=2**53)]


class Plan(BaseModel):
    """Counts what a run, or a variant of a sweep, will have done at its end.

    `variant` has the swept keys and their values; it is empty without a sweep. `rounds` are those
    of all stacks, and `lines` those of the leaderboard. `resumable`: it can be continued.
    """

    # Others may have changed the file: values of other kinds are refused.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scenario: str
    variant: dict[str, Any]
    rounds: Count
    attack_runs: Count
    lines: Count
    resumable: bool
    origin: Annotated[str, Field(pattern=r"^$|^[^:]+:.")] = ""
    """Kind (`data`, `recording` or `run`) and digest of what the run measures, as `data:5f3a...`;
    empty if not known. Runs of two origins are never pooled."""

    @classmethod
    def of(
        cls,
        scenario: str,
        variant: Mapping[str, Any],
        rounds: int,
        jobs: Iterable[tuple[Job, Observation]],
        *,
        resumable: bool = True,
        origin: str = "",
    ) -> Plan:
        """Returns the plan of a run that makes each of `jobs`; other arguments are its fields."""
        every = [
            (
                seen.id.partition("/")[0],
                job.label,
                seen.vantage,
                seen.training.batch_size,
                seen.round,
            )
            for job, seen in jobs
        ]
        return cls(
            scenario=scenario,
            variant=dict(variant),
            rounds=rounds,
            attack_runs=len(every),
            lines=len(set(every)),
            resumable=resumable,
            origin=origin,
        )

    def save(self, folder: Path) -> None:
        """Writes the plan as `plan.json` into the folder of its run."""
        write_json(folder / PLAN, self.model_dump())


def refuse_other_run(out: Path, resolved: str, resume: bool) -> None:
    """Raises a FedsimError if `out` holds a run, unless `resume` continues the same scenario.

    `resolved` is the text of the scenario with every default written out, compared by byte.
    """
    previous = out / "scenario.yaml"
    if not previous.exists():
        return
    if not resume:
        raise FedsimError(
            f"{out} holds a run already: continue it with --resume (in Python, resume=True), or "
            "name another folder with --out (out=...)"
        )
    # Byte by byte: a default that a new version has changed makes another run as well.
    if paths.content(previous, paths.TEXT) != resolved.encode():
        raise FedsimError(
            f"{out} holds a run of another scenario (see its scenario.yaml): resume with the same "
            "scenario and overrides, or name another folder with --out"
        )


def how_to_go_on(error: OSError) -> str:
    """Returns the message for a failed write: the file, the reason, and how to continue the run."""
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}; what has finished is kept: make room or correct the "
        "path, and continue with --resume (in Python, resume=True)"
    )
