"""Records broadcasts and replies of an app that is not fedsim's, and its parts, as a tap sees them.

    OUT/run-7/tap.json                                   who recorded, and what was left out
    OUT/run-7/round-0001/broadcast-<digest>.safetensors  what was sent, once for all who got it
    OUT/run-7/round-0001/node-42.safetensors             what node 42 answered, by the app's names
    OUT/run-7/round-0001/node-42.json                    its metrics, and checksums of both

It holds no model and no hyper-parameter: `fedsim assess` is told these. Every name of a file is a
number or a digest; no text of a message is part of a path.

Files are written whole or not at all, and nobody waits for the disk: what a crash has torn does not
match its checksum. Functions that read raise a FedsimError where a file is missing or damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import save

from fedsim.recording import behind
from fedsim.recording.files import read_tensors, write_bytes
from fedsim.system import paths
from fedsim.types import LARGEST, FedsimError, Tensors
from fedsim.words import number_of

Arrays = Mapping[str, np.ndarray[Any, Any]]
"""Numpy arrays by name; they may share read-only memory with a message."""
_TYPES = [
    *map(np.dtype, ("float64", "float32", "float16", "bool")),
    *map(np.dtype, ("int64", "int32", "int16", "int8", "uint8")),
]
"""Types of arrays that are recorded: those that every version of safetensors and torch reads."""
_RESERVED = "__metadata__"
"""Name that safetensors reserves, so that no tensor can have it."""

TapSide = Literal["server", "client"]
ToldValues = Mapping[str, Mapping[str, Any]]
"""Numbers and short texts of a message, by the name of their record and then by key."""

PartKind = Literal["strategies", "mods"]
"""Sides of an app whose parts are described: the server's strategies, a client's mods."""
PARTS: tuple[PartKind, ...] = ("strategies", "mods")
MOST_ROUNDS = 999_999
_RUN, _ROUND = re.compile(r"run-\d{1,20}"), re.compile(r"round-\d{4,6}")
_TAP = "tap.json"
_WRITTEN = (".safetensors", ".json")
TWICE, CHANGED = "answered twice in a round", "sent with other mods than before"
NO_ROOM = "no room below max_gib"
"""Reasons of what is left out that leave it open how often, or by which mods, a client answered."""
_REASONS, _OTHER = 100, "other reasons"
"""Maximum number of reasons that are told apart, since senders can make up any number."""
_DAMAGED = (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors raised by reading JSON, and numbers in it, that somebody has altered."""


class Exchange(BaseModel):
    """Describes one message that asks a node to train, and its answer: the JSON beside a reply."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[2] = 2
    run_id: int
    round: int = Field(ge=1, le=MOST_ROUNDS)
    node_id: int = Field(ge=0)
    message_id: str
    broadcast: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Digest (XXH3, 128 bits) of the file of what was sent: it tells damage, and is no proof."""
    reply: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Digest of the file that holds what the client answered."""
    config: dict[str, dict[str, Any]]
    """Numbers and texts of what the server sent: name of a record -> key -> value. Of a Flower app
    there are up to 200 records of 200 entries, and texts of 200 characters."""
    metrics: dict[str, dict[str, Any]]
    """Numbers and texts of the answer, by record and key as in `config`."""
    path: Path = Field(default=Path(), exclude=True)
    """File that this exchange was read from."""

    def read_broadcast(self) -> Tensors:
        """Returns the tensors sent, by the app's names; a lost or altered file is a FedsimError."""
        return _read_verified(self.path.parent / _broadcast_name(self.broadcast), self.broadcast)

    def read_reply(self) -> Tensors:
        """Returns the tensors answered, by the app's names; it fails as `read_broadcast`."""
        return _read_verified(self.path.with_suffix(".safetensors"), self.reply)

    def number(self, key: str) -> float | None:
        """Returns the first number within ±1e100 called `key` in a record of `metrics`, or None."""
        for record in self.metrics.values():
            if (number := _number(record.get(key))) is not None:
                return number
        return None


class Recorder:
    """Writes exchanges of one run to `folder`.

    Callers ask `wants` first, and see to it that one thread at a time calls.
    """

    def __init__(
        self,
        out: Path,
        run_id: int,
        side: TapSide,
        *,
        rounds: Collection[int] | None,
        clients: int | None,
        max_bytes: int,
    ) -> None:
        """Continues what is already written of the run, if anything is; writes nothing yet.

        Args:
            out: Folder of all runs; this one's is `run-<run_id>` in it.
            run_id: Id of the run, as Flower gives it.
            side: Side of the app that records.
            rounds: Rounds that are recorded, from 1; None for all.
            clients: Maximum number of nodes, the first that this recorder meets; None for all.
            max_bytes: Maximum size of the run's recorded files.
        """
        self.folder = out / f"run-{run_id}"
        self._run_id = run_id
        self._side: TapSide = side
        self._rounds = None if rounds is None else frozenset(rounds)
        self._clients = clients
        self._max_bytes = max_bytes
        self._used = _count_bytes(self.folder)
        self._nodes: set[int] = set()
        self._left_out: dict[str, int] = {}
        self._parts: dict[PartKind, list[DeployedPart]] = {}
        # Nothing is written yet, or what is cannot be read.
        with suppress(FedsimError):
            self._left_out = _count_left_out(self.folder)
        with suppress(FedsimError):
            found = {kind: _parts_in(self.folder / _TAP, kind) for kind in PARTS}
            self._parts = {kind: parts for kind, parts in found.items() if parts is not None}

    def wants(self, round: int, node_id: int) -> bool:
        """Returns whether to record a node's exchange; if so, it takes a place of the `clients`."""
        # Asked first, so that nodes of other rounds take none of the places.
        if self._rounds is not None and round not in self._rounds:
            return False
        if node_id not in self._nodes:
            if self._clients is not None and len(self._nodes) >= self._clients:
                return False
            self._nodes.add(node_id)
        return True

    def count_recorded(self, node_id: int) -> int:
        """Returns how many answers of the node `node_id` are recorded."""
        return len(list(self.folder.glob(f"round-*/node-{node_id}.json")))

    def save_broadcast(self, round: int, arrays: Arrays) -> str | None:
        """Writes the tensors sent in `round`, once, and returns their digest.

        It is None without room, which is counted as left out. A FedsimError and an OSError are as
        in `save_reply`.
        """
        content = _serialize(arrays)
        digest = xxhash.xxh3_128_hexdigest(content)
        path = self._round(round) / _broadcast_name(digest)
        return digest if path.exists() or self._write(path, content) else None

    def save_reply(
        self,
        reply: Arrays,
        *,
        round: int,
        node_id: int,
        message_id: str,
        broadcast: str,
        config: ToldValues,
        metrics: ToldValues,
    ) -> None:
        """Writes an answer; without room, or as the node's second in a round, it is left out.

        What is left out is counted in tap.json.

        Args:
            reply: Arrays that the client answered, by the app's names.
            round: Number of the round, from 1.
            node_id: Id of the client's node.
            message_id: Id of the order, by which a client's truth is found.
            broadcast: Digest that `save_broadcast` returned for the order.
            config: Numbers and texts of the order.
            metrics: Numbers and texts of the answer.

        Raises:
            FedsimError: safetensors cannot hold an array.
            OSError: the answer cannot be written.
            ValidationError: `round`, `node_id` or `broadcast` is out of range (pydantic's).
        """
        base = self._round(round) / f"node-{node_id}"
        # The JSON is written last: where it is, the whole answer is.
        if base.with_suffix(".json").exists():
            self.leave_out(TWICE)
            return
        # Before the copies that writing takes, which are larger than the answer.
        if not self._has_room(sum(array.nbytes for array in reply.values())):
            return
        content = _serialize(reply)
        if not self._write(base.with_suffix(".safetensors"), content):
            return
        exchange = Exchange(
            run_id=self._run_id,
            round=round,
            node_id=node_id,
            message_id=message_id,
            broadcast=broadcast,
            reply=xxhash.xxh3_128_hexdigest(content),
            config={name: dict(record) for name, record in config.items()},
            metrics={name: dict(record) for name, record in metrics.items()},
        )
        text = exchange.model_dump_json(indent=2) + "\n"
        self._write(base.with_suffix(".json"), text.encode())

    def note_parts(self, kind: PartKind, parts: Sequence[DeployedPart]) -> None:
        """Notes the parts of the app, outermost first, in tap.json once anything is recorded.

        Mods other than those noted before are counted as left out, for reason `CHANGED`.
        """
        before = self._parts.get(kind)
        if before != list(parts):
            self._parts[kind] = list(parts)
            # A strategy's settings change with its state.
            if kind == "mods" and before is not None:
                self.leave_out(CHANGED)
            # Without a recorded answer there is nothing to describe.
            if self.folder.exists():
                with suppress(OSError):
                    self._describe()

    def leave_out(self, reason: str) -> bool:
        """Counts in tap.json a message that is not recorded; returns whether `reason` is new.

        Reasons beyond 100 are counted as one, `other reasons`. A failure to write is ignored.
        """
        if reason not in self._left_out and len(self._left_out) >= _REASONS:
            reason = _OTHER
        self._left_out[reason] = self._left_out.get(reason, 0) + 1
        with suppress(OSError):
            self._describe()
        return self._left_out[reason] == 1

    def _round(self, round: int) -> Path:
        if not self.folder.exists():
            self._describe()
        return self.folder / f"round-{round:04d}"

    def _describe(self) -> None:
        about: dict[str, object] = {
            "format": 2,
            "run_id": self._run_id,
            "side": self._side,
            "left_out": dict(self._left_out),
        }
        for kind, found in self._parts.items():
            about[kind] = [each.model_dump() for each in found]
        text = json.dumps(about, indent=2, allow_nan=False) + "\n"
        write_bytes(self.folder / _TAP, text.encode(), private=True, durable=False)

    def _write(self, path: Path, content: bytes) -> bool:
        """Writes `content` if it fits below the bound, and else counts it as left out."""
        if not self._has_room(len(content)):
            return False
        write_bytes(path, content, private=True, durable=False)
        self._used += len(content)
        return True

    def _has_room(self, size: int) -> bool:
        if self._used + size <= self._max_bytes:
            return True
        self.leave_out(NO_ROOM)
        return False


def _serialize(arrays: Arrays) -> bytes:
    for name, array in arrays.items():
        if array.dtype not in _TYPES:
            raise FedsimError(f"{name[:40]!r}: {array.dtype} cannot be recorded")
        if name == _RESERVED:
            raise FedsimError(f"a tensor is called {name}, and cannot be recorded by that name")
    try:
        # Other memory than that in C's order safetensors would write as if it were.
        return save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    except SafetensorError as error:
        raise FedsimError(f"the tensors cannot be recorded: {error}") from error


def read_exchanges(folder: Path) -> list[Exchange]:
    """Reads what a tap recorded of a run in `folder` (`run_folder`), sorted by round and node.

    A FedsimError says that nothing was recorded, or that a file is damaged or was moved.
    """
    behind.finish()  # a tap of this very process may still be writing
    found = []
    for path in sorted(folder.glob("round-*/node-*.json")):
        if not _ROUND.fullmatch(path.parent.name):
            continue
        try:
            exchange = Exchange.model_validate_json(paths.text(path, paths.TEXT))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise FedsimError(f"{path}: not what a tap records: {error}") from error
        place = f"round-{exchange.round:04d}/node-{exchange.node_id}.json"
        # A file that was moved would be attacked as an answer of another round or node.
        if path.parts[-2:] != tuple(place.split("/")):
            raise FedsimError(f"{path}: says that it is {place}; restore what the tap recorded")
        found.append(exchange.model_copy(update={"path": path}))
    if not found:
        reasons = "; ".join(left_out(folder)) if (folder / _TAP).exists() else ""
        raise FedsimError(
            f"{folder}: no exchange in it"
            + (
                f": left out: {reasons}"
                if reasons
                else "; wrap the app's grid in fedsim.tap(grid, out=...), and run it"
            )
        )
    return sorted(found, key=lambda each: (each.round, each.node_id))


def digest_of(exchanges: Sequence[Exchange]) -> str:
    """Returns a SHA-256 in hex of all that the exchanges' files hold, in any order of exchanges."""
    # Ids of messages are unique, so that two runs with equal tensors differ, too.
    said = sorted(each.model_dump_json() for each in exchanges)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def run_folder(out: Path, run: int | None = None) -> Path:
    """Returns the folder of the recorded run with id `run` in `out`; None: the last changed one.

    `out` itself is returned if it is one and `run` is None. Without any, a FedsimError says so.
    """
    behind.finish()
    if _RUN.fullmatch(out.name) and run is None and out.is_dir():
        return out
    runs = [path for path in out.glob("run-*") if path.is_dir() and _RUN.fullmatch(path.name)]
    if run is not None:
        runs = [path for path in runs if path.name == f"run-{run}"]
    if not runs:
        named = "" if run is None else f" of number {run}"
        raise FedsimError(
            f"{out}: no recorded run{named} in it; name what fedsim.tap(..., out=...) was given"
        )
    # Run ids of Flower are drawn at random, so that only the time tells which is the newest.
    return max(runs, key=lambda path: path.stat().st_mtime_ns)


def left_out(folder: Path) -> list[str]:
    """Returns lines `REASON: n messages` on what a tap left out of a run, in order of appearance.

    A FedsimError says that tap.json is missing or damaged.
    """
    behind.finish()
    return [f"{reason}: {number_of(n, 'message')}" for reason, n in _count_left_out(folder).items()]


def _count_left_out(folder: Path) -> dict[str, int]:
    path = folder / _TAP
    try:
        reasons = json.loads(paths.text(path, paths.TEXT)).get("left_out", {})
        return {str(reason): int(n) for reason, n in reasons.items()}
    except _DAMAGED as error:
        raise FedsimError(f"{path}: not what a tap writes: {error}") from error


def read_parts(folder: Path, kind: PartKind) -> list[DeployedPart] | None:
    """Returns the parts of the app that a tap noted in a run's `folder`, outermost first.

    None says that it noted none of this `kind`. A FedsimError is as in `left_out`.
    """
    behind.finish()
    return _parts_in(folder / _TAP, kind)


def _parts_in(path: Path, kind: PartKind) -> list[DeployedPart] | None:
    try:
        found = json.loads(paths.text(path, paths.TEXT)).get(kind)
        return None if found is None else [DeployedPart.model_validate(each) for each in found]
    except _DAMAGED as error:
        raise FedsimError(f"{path}: not what a tap writes: {error}") from error


def _broadcast_name(digest: str) -> str:
    return f"broadcast-{digest[:16]}.safetensors"


def _read_verified(path: Path, digest: str) -> Tensors:
    # A missing file is left to `read_tensors`, whose error says so.
    if path.is_file():
        with paths.open_regular(path, paths.ARCHIVE) as file:
            found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        if found != digest:
            raise FedsimError(f"{path}: does not match the checksum in its recording")
    return read_tensors(path)


def _count_bytes(folder: Path) -> int:
    written = (path for path in folder.glob("round-*/*") if path.suffix in _WRITTEN)
    return sum(path.stat().st_size for path in written)


LONGEST, MOST = 200, 200
"""Maximum characters of a text, and entries of a record, that are kept of what is not tensors."""


def _number(value: object) -> float | None:
    # To Python a truth value is an integer; an int of JSON may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


PlainValue = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str | list[str]


class DeployedPart(BaseModel):
    """Describes a mod, a filter or a strategy that a tap found in an app."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(max_length=LONGEST)
    """Import name of its class or function."""
    settings: dict[str, PlainValue] = {}
    """Setting -> `plain_value`, or up to 200 texts of 200 characters; others are left out."""

    def number(self, key: str) -> float | None:
        """Returns the setting `key`, a number within ±1e100, or None."""
        return _number(self.settings.get(key))

    def __str__(self) -> str:
        """Names the part without its module, with its settings."""
        stated = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name.rpartition('.')[2]}({stated})"


def describe_part(live: Any, extra: Mapping[str, Any] | None = None) -> DeployedPart:
    """Returns the description of a mod, filter or strategy; `extra` settings win over its own.

    Settings are public attributes among its first 200, with names cut to 200 characters.
    """
    # A function has a name of its own, an object that of its class.
    named = live if hasattr(live, "__qualname__") else type(live)
    given = {**getattr(live, "__dict__", {}), **(extra or {})}
    settings = {
        str(key)[:LONGEST]: plain
        for key, value in list(given.items())[:MOST]
        if not str(key).startswith("_") and (plain := _plain_setting(value)) is not None
    }
    return DeployedPart(
        name=f"{named.__module__}.{named.__qualname__}"[:LONGEST], settings=settings
    )


def plain_value(value: object) -> bool | int | float | str | None:
    """Returns a number (NaN and ±∞ as text), truth value or text cut to 200 characters, or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float):
        return value
    return value[:LONGEST] if isinstance(value, str) else None


def _plain_setting(value: object) -> PlainValue | None:
    if isinstance(value, re.Pattern):
        value = value.pattern
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [each[:LONGEST] for each in value[:MOST]]
    return plain_value(value)
