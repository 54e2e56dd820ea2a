"""Keeps what a client of an app that is not fedsim's trained on, on that client's own disk.

    OUT/run-7/round-0001/node-42-<digest>.safetensors    images, labels, and the order of batches
    OUT/run-7/round-0001/node-42-<digest>.json           whose, of which message, and how it trained
    OUT/run-7/round-0001/unseen-42-<digest>.json         why there is neither, where it trained

Neither a tap nor an attack imports this. A damaged file is refused by a FedsimError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedsim.recording.exchanges import DeployedPart
from fedsim.recording.files import read_tensors, serialize, write_bytes
from fedsim.system import paths
from fedsim.types import FedsimError, Tensors
from fedsim.words import printable


class Witnessed(BaseModel):
    """Describes how one client trained as one message ordered: the JSON beside its images."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    run_id: int
    round: int = Field(ge=0)
    """Round that the order names; 0 if it names none."""
    node_id: int
    message_id: str
    partition: int | None
    """The client's partition-id; None if its node has none."""
    images: int = Field(ge=1)
    """Number of distinct images that were kept."""
    left_out: int = Field(ge=0)
    """Number of images, counted at each use, that were left out as more than `max_images`."""
    sizes: list[Annotated[int, Field(ge=1)]]
    """Number of images of each step, in order; an image that comes again counts again."""
    optimizer: str | None
    """Name of the optimizer's class; None if nothing was stepped."""
    settings: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    """Numeric settings of the optimizer by torch's names; `betas` are `beta1` and `beta2`."""
    training_mode: bool
    """Whether the model's layers computed in training mode."""
    rates: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    """Learning rate of each step; empty in files of earlier versions."""
    factors: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    """Ratio, by step, of its gradient to that of its images' mean loss; empty if not known."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    class_weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """Weight of each class in the loss; None if the loss has none."""
    proximal: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight μ of FedProx's proximal term; 0 for none."""
    mods: list[DeployedPart] | None = None
    """Mods of the client's app, outermost first; None in files of earlier versions."""
    unmodelled: list[str] = []
    """Names of traits of the training that were seen and that no attack models."""

    @property
    def steps(self) -> int:
        """Number of local steps."""
        return len(self.sizes)


@dataclass(frozen=True)
class Testimony:
    """Holds what a witness kept of one client's training: the JSON file and its content."""

    path: Path
    said: Witnessed

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of an image; errors are those of `images`, which it reads."""
        channels, height, width = self.images()[0].shape[1:]
        return channels, height, width

    def images(self) -> tuple[Tensor, Tensor]:
        """Returns the distinct images (N, C, H, W), as the model got them, and labels (N,) int64.

        A file that is missing, or that no witness writes, is a FedsimError.
        """
        found = read_tensors(self.path.with_suffix(".safetensors"))
        images, labels = found.get("images"), found.get("labels")
        if (
            images is None
            or labels is None
            or images.ndim != 4
            or len(images) != self.said.images
            or not images.is_floating_point()
            or labels.shape != images.shape[:1]
            or labels.dtype != torch.int64
            or not torch.isfinite(images).all()
        ):
            raise FedsimError(f"{self.path}: not what a witness writes")
        return images, labels


def save_witnessed(out: Path, said: Witnessed, tensors: Tensors) -> None:
    """Writes what a client trained on into the folder `out` of all runs, for its owner to read.

    `tensors` has the distinct `images` (N, C, H, W), their `labels` (N,) int64, and the `order` in
    which steps used them, as indices, without images that were left out. An OSError says that
    nothing can be written; so it does in `save_unseen`.
    """
    base = _base(out, said.run_id, said.round, "node", said.node_id, said.message_id)
    # Waiting for the disk would hold up the client.
    content = serialize(tensors)
    write_bytes(base.with_suffix(".safetensors"), content, private=True, durable=False)
    text = said.model_dump_json(indent=2) + "\n"
    write_bytes(base.with_suffix(".json"), text.encode(), private=True, durable=False)


def save_unseen(
    out: Path, run_id: int, round: int, node_id: int, message_id: str, *, reason: str
) -> None:
    """Writes why nothing is kept of a client's training as one message ordered.

    Args:
        out: Folder of all runs.
        run_id: Id of the run.
        round: Number of the round; 0 if the order names none.
        node_id: Id of the client's node.
        message_id: Id of the order.
        reason: The reason, in words.
    """
    path = _base(out, run_id, round, "unseen", node_id, message_id).with_suffix(".json")
    text = json.dumps({"format": 1, "reason": reason}, indent=2) + "\n"
    write_bytes(path, text.encode(), private=True, durable=False)


def _base(out: Path, run_id: int, round: int, kind: str, node_id: int, message_id: str) -> Path:
    # Its digest stands for the id, which is text from outside and must be no part of a path.
    digest = hashlib.sha256(message_id.encode()).hexdigest()[:16]
    return run_of(out, run_id) / f"round-{round:04d}" / f"{kind}-{node_id}-{digest}"


def run_of(out: Path, run_id: int) -> Path:
    """Returns the folder of the run `run_id` below `out`."""
    return out / f"run-{run_id}"


def read_witnessed(out: Path, run_id: int) -> Mapping[str, Testimony]:
    """Returns what was witnessed of run `run_id`, by the id of the message that ordered it.

    `out` is the folder of all runs, or that of this run. A FedsimError says that nothing was
    witnessed, or that a JSON file is damaged.
    """
    # Callers may name the run's own folder, or that of all runs.
    folder = out if out.name == f"run-{run_id}" else run_of(out, run_id)
    found: dict[str, Testimony] = {}
    for path in sorted(folder.glob("round-*/node-*.json")):
        try:
            said: Any = Witnessed.model_validate_json(paths.text(path, paths.TEXT))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise FedsimError(f"{path}: not what a witness writes: {error}") from error
        found[said.message_id] = Testimony(path, said)
    if not found and (reason := _unseen(folder)):
        raise FedsimError(
            f"{folder}: the witness was there, and what it saw cannot be attacked: {reason}"
        )
    if not found:
        raise FedsimError(
            f"{folder}: nothing was witnessed of this run; give the app's ClientApp "
            "mods=[fedsim.witness(out=...)], and run it again"
        )
    return found


def _unseen(folder: Path) -> str:
    for path in sorted(folder.glob("round-*/unseen-*.json")):
        try:
            reason = json.loads(paths.text(path, paths.TEXT))["reason"]
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise FedsimError(f"{path}: not what a witness writes: {error}") from error
        return printable(str(reason)[:_LONGEST])
    return ""


_LONGEST = 500
"""Maximum number of characters of a reason that are shown."""
