"""Keeps what a watch saw of a client's training, whatever framework ordered it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedsim.recording.deployed_parts import DeployedPart
from fedsim.recording.witnessed import Witnessed, run_of, save_unseen, save_witnessed
from fedsim.training.watching import Steps
from fedsim.types import FedsimError


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """Identifies the order by which a client trained."""

    run_id: int
    """Number of the app's run."""
    round: int
    """Round that the order names; 0 if it names none."""
    node_id: int
    """Number of the client's node."""
    message_id: str
    """Identifies the order's message within the run."""
    partition: int | None = None
    """The client's number among the partitions of the data, if it has one."""


_WATCHED = (
    *("left_out", "sizes", "optimizer", "settings", "training_mode"),
    *("rates", "factors", "proximal", "unmodelled"),
)
"""Fields of `Steps` that a testimony has under the same names."""


def keep_testimony(
    folder: Path, steps: Steps, order: TrainingOrder, mods: list[DeployedPart], max_bytes: int
) -> None:
    """Writes the watched `steps` of one `order` below `folder`.

    `mods` are the parts of the app that change the answer, outermost first, and `max_bytes` bounds
    all that is kept of a run. Where no truth was seen, the reason is written before it is raised.

    Raises:
        FedsimError: The training has no truth that an attack could be scored by, or no room.
    """
    if steps.failure is not None or not steps.images:
        reason = _why_nothing(steps)
        ids = order.run_id, order.round, order.node_id, order.message_id
        save_unseen(folder, *ids, reason=reason)
        raise FedsimError(reason)
    watched = {name: getattr(steps, name) for name in _WATCHED}
    said = Witnessed(**vars(order), images=len(steps.images), mods=mods, **watched, **steps.loss)
    images = torch.stack(steps.images)
    # Counted on disk, since each message may come to another process.
    files = run_of(folder, order.run_id).rglob("*.safetensors")
    used = sum(path.stat().st_size for path in files)
    if used + images.numel() * images.element_size() > max_bytes:
        raise FedsimError("there is no room for it below max_gib")
    save_witnessed(
        folder,
        said,
        {
            "images": images,
            "labels": torch.tensor(steps.labels),
            "order": torch.tensor(steps.order),
        },
    )


def _why_nothing(steps: Steps) -> str:
    """Returns the reason why a training has no truth that fedsim could score an attack by."""
    if steps.failure is not None:
        return f"the witness cannot follow how the client trains: {steps.failure}"
    if steps.saw_images:
        return (
            "the model was called with images, and no cross-entropy (or negative log-likelihood) "
            "of one class number for each image was seen: fedsim attacks classifiers of images, "
            "and not segmentation, several labels of an image, or other losses"
        )
    if steps.called_with is not None:
        return (
            f"the model was called with {steps.called_with}: in apps that are not its own, fedsim "
            "attacks images alone (floating point, of shape (N, C, H, W)), not text or tables"
        )
    return (
        "no model was seen that computes gradients in the client's own thread; "
        "docs/your-own-flower-app.md says what can be seen"
    )
