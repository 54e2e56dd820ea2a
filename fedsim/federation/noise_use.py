"""What a round's noise was used for: it follows from the seed and the round, and serves once.

Two releases of different values with the same noise have a difference without any. The same value
with two noises has less noise in the mean, and rounds out of order have the memory of others. What
would need one of these, and a note that is damaged, is refused with a `FedsimError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.recording.files import write_bytes
from fedsim.system import paths
from fedsim.training.inputs import digest
from fedsim.training.schedule import Probe
from fedsim.types import FedsimError, Tensors


def release_key(round: int, probe: Probe | None) -> tuple[int, ...]:
    """What decides the noise of a release: its round, and of a probe which one it is."""
    return (round, probe.batch_size, probe.trial, probe.release) if probe else (round,)


def notes(out: Path, stack: str, who: str) -> Path:
    """Where it is noted what the noise of `who`, a client or the server, was used for."""
    return out / "client_state" / stack / who / "answered.jsonl"


def use_once(
    path: Path, own: tuple[int, ...], values: Sequence[Tensors], who: str, what: str = "noise"
) -> None:
    """Note in `path` that the noise of what was `asked` is used for `values`; for no others.

    Args:
        path: A file of JSON lines, made if it is not there.
        own: As `release_key` says.
        values: What decides the release, or the release itself.
        who: Uses the noise, for the message.
        what: It uses, for the message.
    """
    at, noted = digest(*values), _read(path)
    before = [entry["digest"] for entry in noted if entry["asked"] == list(own)]
    if before and at not in before:
        raise FedsimError(
            f"{who} has answered in round {own[0]} for other values, and its {what} is not used "
            "twice: run the scenario anew, with another --out"
        )
    if not before:
        _write(path, [*noted, {"asked": list(own), "digest": at}])


def noted_rounds(path: Path) -> list[int]:
    """The rounds in which noise was used."""
    return [entry["asked"][0] for entry in _read(path)]


def refuse_past(path: Path, own: tuple[int, ...], who: str) -> None:
    """Refuse what was not answered in its turn: a later round has been."""
    noted = _read(path)
    is_released = any("release" in entry for entry in noted if entry["asked"] == list(own))
    last = max(noted_rounds(path), default=0)
    if own[0] < last and not is_released:
        raise FedsimError(
            f"{who} has answered in round {last}, and does not go back to what it has not answered "
            f"in round {own[0]}: run the scenario anew, with another --out"
        )


def note_release(path: Path, own: tuple[int, ...], release: Sequence[Tensors], who: str) -> None:
    """Note what is released of that for which noise is used: nothing else ever is.

    Args:
        path: As `use_once` has written it.
        own: As `release_key` says.
        release: All of it.
        who: Releases it, for the message.
    """
    at, noted = digest(*release), _read(path)
    for entry in noted:
        if entry["asked"] == list(own) and entry.setdefault("release", at) != at:
            raise FedsimError(
                f"{who} has answered in round {own[0]} with other bytes than it computes now, and "
                "two answers of one noise tell of it: answer on the processor and with the "
                "versions of then, or run the scenario anew, with another --out"
            )
    _write(path, noted)


def _read(path: Path) -> list[dict[str, Any]]:
    text = paths.text(path, paths.TEXT) if path.exists() else ""
    try:
        noted = [json.loads(line) for line in text.splitlines()]
        assert all(entry["asked"][0] >= 1 and entry["digest"] for entry in noted)
    except (AssertionError, ValueError, LookupError, TypeError) as error:
        raise FedsimError(
            f"{path}: damaged, so that nobody knows what noise was used for: run the scenario "
            "anew, with another --out"
        ) from error
    return noted


def _write(path: Path, noted: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(f"{json.dumps(entry)}\n" for entry in noted)
    write_bytes(path, text.encode(), private=True)
