"""What a round's noise was used for: it follows from the seed and the round, and serves once.

Two releases of different values with the same noise have a difference without any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedsim.recording.files import write_bytes
from fedsim.system import paths
from fedsim.training.inputs import digest
from fedsim.training.schedule import Probe
from fedsim.types import FedsimError, Tensors


def asked(round: int, probe: Probe | None) -> tuple[int, ...]:
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
        own: As `asked` says.
        values: What decides the release, or the release itself.
        who: Uses the noise, for the message.
        what: It uses, for the message.

    Raises:
        FedsimError: it was used for other values, or `path` is damaged.
    """
    at = digest(*values)
    text = paths.text(path, paths.TEXT) if path.exists() else ""
    try:
        noted = [json.loads(line) for line in text.splitlines()]
        before = [found["digest"] for found in noted if found["asked"] == list(own)]
    except (ValueError, KeyError, TypeError) as error:
        raise FedsimError(
            f"{path}: damaged, so that nobody knows what noise was used for: run the scenario "
            "anew, with another --out"
        ) from error
    if before and at not in before:
        raise FedsimError(
            f"{who} has answered in round {own[0]} for other values, and its {what} is not used "
            "twice: run the scenario anew, with another --out"
        )
    if not before:
        line = json.dumps({"asked": list(own), "digest": at}) + "\n"
        write_bytes(path, (text + line).encode(), private=True)
