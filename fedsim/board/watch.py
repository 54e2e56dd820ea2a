"""Keeps the page's data as new as the run folders are, and builds it again only if they changed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.board.compact import SENTENCE, shortened
from fedsim.board.data import board_data, document
from fedsim.results.plan import PLAN
from fedsim.results.reading import RESULTS
from fedsim.system.lock import is_locked
from fedsim.types import FedsimError

_FILES = (PLAN, RESULTS, "rounds.jsonl", "audit.jsonl", "record.json", "scenario.yaml")

_Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Version:
    """The data at one time, and a name that another time's data does not have."""

    data: dict[str, Any]
    body: bytes
    """The data as JSON."""
    tag: str


class Watched:
    """The data of some run folders; safe to ask from several threads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Reads nothing yet.

        Args:
            folders: of runs, or that hold folders of runs.
        """
        self._folders = folders
        self._lock = threading.Lock()
        self._signature: _Signature | None = None
        self._version = _version(document([], []))

    def current(self) -> Version:
        """Returns the data of the folders as they are now.

        While they cannot be read, as before the first result, it is the data of the last time with
        the `problem` in it.
        """
        with self._lock:
            signature = self._signed()
            if signature != self._signature:
                try:
                    self._version = _version(board_data(self._folders))
                except Exception as error:  # else the page would stand still, and nobody be told
                    problem = str(error)
                    if not isinstance(error, FedsimError | OSError):
                        problem = f"{type(error).__name__}: {error}"
                    problem = problem.encode(errors="backslashreplace").decode()
                    problem = shortened(problem, SENTENCE)
                    self._version = _version({**self._version.data, "problem": problem})
                self._signature = signature
            return self._version

    def _signed(self) -> _Signature:
        """Returns size and time of every file that the data depends on."""
        entries = []
        for folder in self._folders:
            found = [*folder.rglob(RESULTS), *folder.rglob(PLAN)]
            for run in sorted({path.parent for path in found}):
                entries.append((str(run), int(is_locked(run)), 0))  # a kill changes no file
                for path in (run / name for name in _FILES):
                    try:
                        status = path.stat()
                    except OSError:
                        continue
                    entries.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(entries)


def _version(data: dict[str, Any]) -> Version:
    body = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    return Version(data=data, body=body, tag=f'"{hashlib.sha256(body).hexdigest()[:32]}"')
