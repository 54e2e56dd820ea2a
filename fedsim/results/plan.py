"""What a run sets out to do, written before it begins: so that anybody can say how far it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsim.attacking.jobs import Job
from fedsim.recording.files import write_json
from fedsim.results.record import strict_json
from fedsim.system import paths
from fedsim.types import FedsimError, Observation

PLAN = "plan.json"

Line = tuple[str, str, str, int, int]
"""Identifies a line of the leaderboard within a run: (defense, attack, vantage, batch size,
round)."""

_KINDS: Mapping[str, type] = {
    "scenario": str,
    "variant": dict,
    "rounds": int,
    "attack_runs": int,
    "lines": int,
    "resumable": bool,
    "origin": str,
}
"""Kind of each value of a plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run, or a variant of a sweep, will have done at its end."""

    scenario: str
    variant: dict[str, Any]
    rounds: int
    """Of training, of all defense stacks together."""
    attack_runs: int
    lines: int
    """Of the leaderboard, each of several attack runs."""
    resumable: bool
    """Whether `--resume` goes on with it."""
    origin: str = ""
    """Digest of what it measures, behind its kind, as `data:5f3a...`; empty: not known.

    Runs of one name and of two origins are never pooled."""

    def __post_init__(self) -> None:
        """Refuses values of other kinds, since others may have changed the file.

        Raises:
            TypeError: one is of another kind, or a number is none that can be counted to.
        """
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            is_count = isinstance(value, int) and 0 <= value < 2**53
            if type(value) is not kind or (kind is int and not is_count):
                bounds = ", 0 or more" if kind is int else ""
                raise TypeError(f"{name}: expected {kind.__name__}{bounds}, got {value!r:.40}")
        if self.origin != "" and not all(self.origin.partition(":")[::2]):
            raise TypeError(f"origin: expected kind:digest, got {self.origin!r}")

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
        """Returns the plan to make each of `jobs`."""
        every = [line_of(job, seen) for job, seen in jobs]
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
        """Writes the plan into the folder of its run."""
        write_json(folder / PLAN, asdict(self))


def line_of(job: Job, seen: Observation) -> Line:
    """Returns the line that an attack on a recording belongs to."""
    stack = seen.id.partition("/")[0]
    return stack, job.label, seen.vantage, seen.training.batch_size, seen.round


def load_plan(folder: Path) -> Plan | None:
    """Reads the plan of the run in `folder`; None of a run from before there were any.

    Raises:
        FedsimError: it is damaged.
    """
    path = folder / PLAN
    if not path.exists():
        return None
    try:
        return Plan(**strict_json(paths.text(path, paths.TEXT)))
    except (ValueError, TypeError, RecursionError) as error:
        raise FedsimError(
            f"{path}: not what fedsim writes: {error}; remove it, and it is not told how far the "
            "run is"
        ) from error
