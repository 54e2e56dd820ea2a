"""What a round's noise was used for: it follows from the seed and the round, and serves once.

Two releases of different values with the same noise have a difference without any. The same value
with two noises has less noise in the mean, and rounds out of order have the memory of others.
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


class NoiseNotes:
    """Notes of how one owner used the noise of its releases, in a file that outlives a kill."""

    def __init__(self, path: Path, who: str) -> None:
        """Keeps notes in the file at `path`, which need not exist; errors call the owner `who`."""
        self._path, self._who = path, who

    @classmethod
    def of_server(cls, out: Path, stack: str, who: str) -> NoiseNotes:
        """Returns the notes of noise that the server draws for `who`, in the run's folder `out`.

        `who` names a folder, and the owner in errors: `server`, or `strategy` for Flower's noise.
        """
        return cls(out / "client_state" / stack / who / "answered.jsonl", f"the {who}")

    def use_once(
        self, own: tuple[int, ...], values: Sequence[Tensors], what: str = "noise"
    ) -> None:
        """Notes that a release's noise is used for `values`; later, others are a FedsimError.

        `own` is its `release_key`, and `values` all that decides it, or the release itself. `what`
        names in an error what is used once. A damaged file is a FedsimError, too.
        """
        at, noted = digest(*values), self._read()
        before = [entry["digest"] for entry in noted if entry["asked"] == list(own)]
        if before and at not in before:
            raise FedsimError(
                f"{self._who} has answered in round {own[0]} for other values, and its {what} is "
                "not used twice: run the scenario anew, with another --out"
            )
        # The same question at the same values has the same answer: it needs no second note.
        if not before:
            self._write([*noted, {"asked": list(own), "digest": at}])

    def rounds(self) -> list[int]:
        """Returns each noted release's round by first use, if any; damage is a FedsimError."""
        return [entry["asked"][0] for entry in self._read()]

    def refuse_past(self, own: tuple[int, ...]) -> None:
        """Refuses, by a FedsimError, a release of a round before the latest that is noted.

        One whose `own`, its `release_key`, was given to `note_release` before passes. A damaged
        file is a FedsimError, too.
        """
        # What was released before may be said again, since it is the same bytes.
        is_released = any("release" in entry for entry in self._read() if entry["asked"] == [*own])
        last = max(self.rounds(), default=0)
        if own[0] < last and not is_released:
            raise FedsimError(
                f"{self._who} has answered in round {last}, and does not go back to what it has "
                f"not answered in round {own[0]}: run the scenario anew, with another --out"
            )

    def note_release(self, own: tuple[int, ...], release: Sequence[Tensors]) -> None:
        """Notes a digest of the tensors that are released; others later are a FedsimError.

        Nothing is noted unless `use_once` has noted `own`, the `release_key`, before. A damaged
        file is a FedsimError, too.
        """
        at, noted = digest(*release), self._read()
        for entry in noted:
            # The first digest stays, and every later answer is held against it.
            if entry["asked"] == list(own) and entry.setdefault("release", at) != at:
                raise FedsimError(
                    f"{self._who} has answered in round {own[0]} with other bytes than it computes "
                    "now, and two answers of one noise tell of it: answer on the processor and "
                    "with the versions of then, or run the scenario anew, with another --out"
                )
        self._write(noted)

    def _read(self) -> list[dict[str, Any]]:
        text = paths.text(self._path, paths.TEXT) if self._path.exists() else ""
        try:
            noted = [json.loads(line) for line in text.splitlines()]
            assert all(entry["asked"][0] >= 1 and entry["digest"] for entry in noted)
        except (AssertionError, ValueError, LookupError, TypeError) as error:
            raise FedsimError(
                f"{self._path}: damaged, so that nobody knows what noise was used for: run the "
                "scenario anew, with another --out"
            ) from error
        return noted

    def _write(self, noted: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(f"{json.dumps(entry)}\n" for entry in noted)
        write_bytes(self._path, text.encode(), private=True)
