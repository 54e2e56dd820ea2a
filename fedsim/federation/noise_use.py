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
from fedsim.rng import digest
from fedsim.system import paths
from fedsim.training.schedule import Probe
from fedsim.types import FedsimError, Tensors


def release_key(round: int, probe: Probe | None) -> tuple[int, ...]:
    """Returns the key of a release, which decides its noise: (round,) for training.

    The key of a probe's release is (round, batch size, trial, number of the release).
    """
    return (round, probe.batch_size, probe.trial, probe.release) if probe else (round,)


def notes(out: Path, stack: str, who: str) -> Path:
    """Returns the path of the file below `out` that notes how `who` used noise in `stack`."""
    return out / "client_state" / stack / who / "answered.jsonl"


def use_once(
    path: Path, own: tuple[int, ...], values: Sequence[Tensors], who: str, what: str = "noise"
) -> None:
    """Notes in `path` that the noise of one release is used for `values`, and for no others.

    `own` is the key of the release, and `values` all that decides it, or the release itself. `who`
    and `what` name the owner and what is used once, for the error.
    """
    at, noted = digest(*values), _read(path)
    before = [entry["digest"] for entry in noted if entry["asked"] == list(own)]
    if before and at not in before:
        raise FedsimError(
            f"{who} has answered in round {own[0]} for other values, and its {what} is not used "
            "twice: run the scenario anew, with another --out"
        )
    # The same question at the same values has the same answer: it needs no second note.
    if not before:
        _write(path, [*noted, {"asked": list(own), "digest": at}])


def noted_rounds(path: Path) -> list[int]:
    """Returns the round of each noted release, in the order of use; empty without a file."""
    return [entry["asked"][0] for entry in _read(path)]


def refuse_past(path: Path, own: tuple[int, ...], who: str) -> None:
    """Refuses `who` a new release, of key `own`, in a round before one that `path` notes."""
    noted = _read(path)
    # What was released before may be said again, since it is the same bytes.
    is_released = any("release" in entry for entry in noted if entry["asked"] == list(own))
    last = max(noted_rounds(path), default=0)
    if own[0] < last and not is_released:
        raise FedsimError(
            f"{who} has answered in round {last}, and does not go back to what it has not answered "
            f"in round {own[0]}: run the scenario anew, with another --out"
        )


def note_release(path: Path, own: tuple[int, ...], release: Sequence[Tensors], who: str) -> None:
    """Notes a digest of what is released, so that nothing else has the same noise.

    `path`, `own` and `who` are those of `use_once`, which has to have noted this key before.
    """
    at, noted = digest(*release), _read(path)
    for entry in noted:
        # The first digest stays, and every later answer is held against it.
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
