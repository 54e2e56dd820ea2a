"""An auditor's truth from anybody's Flower client: a mod that keeps what the client trained on.

    app = ClientApp(mods=[fedsim.witness(out="witnessed")])

What it keeps stays on the client's own disk. No message says that it is there, nor holds any of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from flwr.app import Context, Message

from fedsim.federation.tapping import Mod, folder_with_room, round_of, trains
from fedsim.recording.witnessed import Witnessed, run_of, save_unseen, save_witnessed
from fedsim.training.watching import Steps, watch_training
from fedsim.types import FedsimError

_log = logging.getLogger("fedsim.witness")


def witness(
    out: str | Path,
    *,
    rounds: Collection[int] | None = None,
    max_images: int = 4096,
    max_gib: float = 2.0,
) -> Mod:
    """Returns a mod of a ClientApp that keeps the images and labels that the client trains on.

    Images are kept as the model is called with them: transformed and normalized. `watch_training`
    says what it cannot see.

    Args:
        out: A folder of the client's own; each run of the app gets its own in it, `run-<id>`.
        rounds: Rounds that are kept, counted from 1; default all.
        max_images: Maximum number of distinct images kept of one order to train; others are
            counted.
        max_gib: Maximum size of a run on this disk, in GiB; what does not fit is not kept.

    Raises:
        FedsimError: A value is out of range.
    """
    if max_images < 1:
        raise FedsimError(f"max_images: expected at least 1, got {max_images}")
    folder, max_bytes = folder_with_room(out, max_gib)
    wanted = None if rounds is None else frozenset(rounds)

    def mod(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        if not trains(message) or not message.has_content():
            return call_next(message, context)
        round = round_of(message.content) or 0
        if wanted is not None and round not in wanted:
            return call_next(message, context)
        with watch_training(max_images) as steps:
            reply = call_next(message, context)
        try:
            _keep(folder, steps, message, context, round, max_bytes)
        except Exception as error:  # the app goes on without a witness
            _log.warning("fedsim.witness: what was trained on is not kept: %s", error)
        return reply

    return mod


def _keep(
    folder: Path, steps: Steps, message: Message, context: Context, round: int, max_bytes: int
) -> None:
    if steps.failure is not None or not steps.images:
        reason = _why_nothing(steps)
        ids = context.run_id, round, context.node_id, message.metadata.message_id
        save_unseen(folder, *ids, reason=reason)
        raise FedsimError(reason)
    partition = context.node_config.get("partition-id")
    said = Witnessed(
        run_id=context.run_id,
        round=round,
        node_id=context.node_id,
        message_id=message.metadata.message_id,
        partition=partition if isinstance(partition, int) else None,
        images=len(steps.images),
        left_out=steps.left_out,
        sizes=steps.sizes,
        optimizer=steps.optimizer,
        settings=steps.settings,
        training_mode=steps.training_mode,
        rates=steps.rates,
        factors=steps.factors,
        proximal=steps.proximal,
        unmodelled=steps.unmodelled,
        **steps.loss,
    )
    images = torch.stack(steps.images)
    # Counted on disk, since each message may come to another process.
    files = run_of(folder, context.run_id).rglob("*.safetensors")
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
