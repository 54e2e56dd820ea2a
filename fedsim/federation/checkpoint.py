"""Checkpoints of a stack's training: enough to go on after a kill as if nothing had happened.

Each is one file, `OUT/checkpoints/<stack>.safetensors`, replaced as a whole and never pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsim.federation import spool
from fedsim.recording.files import read_tensors, remove_rounds, remove_torn, write_bytes
from fedsim.scenario import Scenario
from fedsim.scenario.model import Privacy
from fedsim.system import memory
from fedsim.system.paths import from_home, open_regular, regular
from fedsim.types import FedsimError, Tensors

_INDEX = "checkpoint"


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    fingerprint: str
    round: int
    rounds: int
    strategy: dict[str, Any]
    held: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """State of a stack's training after `round`; loaded tensors are on the CPU, in any order."""

    round: int
    """Number of the last round that is done, from 1."""
    parameters: Tensors
    """Parameters of the global model, by name."""
    buffers: Tensors
    """Float buffers of the global model, by name."""
    strategy: Mapping[str, Any]
    """The strategy's memory as JSON values, which refer to `strategy_tensors` by name."""
    strategy_tensors: Tensors
    """The strategy's tensors, by the names that `strategy` has for them."""


class Checkpoints:
    """Writes and reads the checkpoint of one stack of one run; only the latest is kept."""

    def __init__(
        self, out: Path, scenario: Scenario, stack: str, held: Sequence[int] | None = None
    ) -> None:
        """Names the checkpoint of one stack, and reads none yet; raises what `fingerprint` raises.

        Args:
            out: The run's folder.
            scenario: The scenario; a checkpoint of another is refused.
            stack: Name of the stack, a key of `scenario.defenses`.
            held: Number of examples of each client; None leaves out the check of the data.
        """
        self._out = out
        self._held = None if held is None else list(held)
        self._stack = stack
        self._rounds = scenario.training.rounds
        self._fingerprint = fingerprint(scenario, stack)
        self._path = out / "checkpoints" / f"{stack}.safetensors"
        self._recordings = out / "observations" / stack

    def start(self) -> None:
        """Removes all recordings of rounds after the last checkpoint, which are trained again.

        Half-written files and spooled answers of the stack go, too. A FedsimError says that the
        checkpoint is damaged, or of another scenario or other data.
        """
        index = self._index()
        done = index.round if index else 0
        # One recording must never mix what two runs of a round saw.
        remove_rounds(self._recordings, done)
        shutil.rmtree(spool.scratch(self._out, self._stack), ignore_errors=True)
        for folder in (self._recordings, self._path.parent):
            remove_torn(folder)

    @property
    def begun(self) -> bool:
        """Whether the stack has a checkpoint (a FedsimError as in `load`) or a recording."""
        return self._index() is not None or self._recordings.exists()

    @property
    def complete(self) -> bool:
        """Whether the scenario's last round has a checkpoint; a FedsimError as in `load`."""
        index = self._index()
        return index is not None and index.round >= index.rounds

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes `checkpoint` in place of the last one; a kill leaves one of the two whole."""
        tensors = {f"parameter.{name}": value for name, value in checkpoint.parameters.items()}
        tensors |= {f"buffer.{name}": value for name, value in checkpoint.buffers.items()}
        tensors |= {f"strategy.{n}": value for n, value in checkpoint.strategy_tensors.items()}
        # safetensors refuses to write views that are not contiguous.
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        index = _Index(
            fingerprint=self._fingerprint,
            round=checkpoint.round,
            rounds=self._rounds,
            strategy=dict(checkpoint.strategy),
            held=self._held,
        )
        content = save(tensors, {_INDEX: index.model_dump_json()})
        write_bytes(self._path, content, private=True)

    def load(self) -> Checkpoint | None:
        """Returns the latest checkpoint; None if there is none.

        A FedsimError says that it is damaged, or of another scenario or other data.
        """
        index = self._index()
        if index is None:
            return None
        tensors = read_tensors(self._path)
        return Checkpoint(
            round=index.round,
            parameters=_under("parameter.", tensors),
            buffers=_under("buffer.", tensors),
            strategy=index.strategy,
            strategy_tensors=_under("strategy.", tensors),
        )

    def _index(self) -> _Index | None:
        if not self._path.exists():
            return None
        try:
            whole = regular(self._path, memory.limit())
            with safe_open(whole, framework="pt") as file:
                index = _Index.model_validate_json(file.metadata()[_INDEX])
        except (OSError, SafetensorError, KeyError, TypeError, ValidationError) as error:
            raise FedsimError(
                f"{self._path}: not a checkpoint of fedsim ({error}); remove it to train again"
            ) from error
        if index.fingerprint != self._fingerprint:
            raise FedsimError(
                f"{self._path}: a checkpoint of another scenario; resume with the same data, "
                "model, training, federation, defense and observe sections, or use another folder"
            )
        # The noise of an ε asked for, and the ε that is stated, are of how much clients hold.
        if self._held is not None and index.held not in (None, self._held):
            raise FedsimError(
                f"{self._path}: a checkpoint of other data: counts by client are {index.held},"
                f" and now {self._held}; restore the data, or use another folder"
            )
        return index


def fingerprint(scenario: Scenario, stack: str) -> str:
    """Returns a hexadecimal SHA-256 digest of all that decides what `stack`'s training gives.

    The file `training.weights` counts by its content: an OSError if it is missing, a FedsimError if
    it is not a regular file.
    """
    sections = scenario.model_dump(
        mode="json",
        include={"seed", "device", "threads", "data", "learner", "model", "training", "observe"},
    )
    if scenario.training.weights is not None:
        # By content, since another file under the same name would train another model.
        with open_regular(from_home(scenario.training.weights), memory.limit()) as file:
            sections["weights"] = hashlib.file_digest(file, "sha256").hexdigest()
    # The noise of an ε that is asked for follows from δ, and from what is counted. Fingerprints of
    # scenarios that leave both as they are stay those of older checkpoints.
    if scenario.privacy != Privacy():
        sections["privacy"] = scenario.privacy.model_dump(mode="json")
    sections["defense"] = [ref.model_dump(mode="json") for ref in scenario.defenses[stack]]
    # Engines compute the same bytes, and the other two decide nothing that clients compute.
    sections["federation"] = scenario.federation.model_dump(
        mode="json", exclude={"engine", "timeout", "checkpoint_every"}
    )
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def _under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
