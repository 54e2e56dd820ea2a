"""Writes what a run sets out to do before it begins, so that anybody can tell how far it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedsim.attacking.jobs import Job
from fedsim.recording.files import write_json
from fedsim.results.record import describe_fault, strict_json
from fedsim.system import paths
from fedsim.types import FedsimError, Observation

PLAN = "plan.json"

Line = tuple[str, str, str, int, int]
"""Identifies a line of the leaderboard within a run: (defense, attack, vantage, batch size,
round)."""

Count = Annotated[int, Field(ge=0, lt=2**53)]


class Plan(BaseModel):
    """Counts what a run, or a variant of a sweep, will have done at its end."""

    # Others may have changed the file: values of other kinds are refused.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scenario: str
    variant: dict[str, Any]
    rounds: Count
    """Number of rounds of training, of all defense stacks together."""
    attack_runs: Count
    lines: Count
    """Number of lines of the leaderboard, each of several attack runs."""
    resumable: bool
    """Whether `--resume` can continue the run."""
    origin: Annotated[str, Field(pattern=r"^$|^[^:]+:.")] = ""
    """Kind and digest of what the run measures, as `data:5f3a...`; empty if not known.

    Runs of one name and of two origins are never pooled."""

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
        """Returns the plan of a run that makes each of `jobs`.

        Args:
            scenario: Name of the scenario.
            variant: Keys and values that set the run apart in a sweep.
            rounds: Number of rounds of all defense stacks together.
            jobs: Each attack run, with the observation that is attacked.
            resumable: Whether `--resume` can continue the run.
            origin: Kind and digest of what the run measures, as `data:5f3a...`.
        """
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
        """Writes the plan into the folder of its run."""
        write_json(folder / PLAN, self.model_dump())


def load_plan(folder: Path) -> Plan | None:
    """Reads the plan of the run in `folder`; None if it has none, as runs of earlier versions.

    Raises:
        FedsimError: the plan is damaged.
    """
    path = folder / PLAN
    if not path.exists():
        return None
    try:
        return Plan.model_validate(strict_json(paths.text(path, paths.TEXT)))
    except (ValueError, TypeError, RecursionError) as error:
        raise FedsimError(
            f"{path}: not what fedsim writes: {describe_fault(error)}; remove it, and "
            "nothing tells how far the run is"
        ) from error
