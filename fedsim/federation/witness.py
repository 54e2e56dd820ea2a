"""An auditor's truth from anybody's Flower client: a mod that keeps what the client trained on.

    app = ClientApp(mods=[fedsim.witness(out="witnessed")])

What it keeps stays on the client's own disk. No message says that it is there, nor holds any of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from flwr.app import Context, Message

from fedsim.federation.live_parts import list_mods
from fedsim.federation.tapping import Mod, folder_with_room, round_of, trains
from fedsim.training.watching import TrainingOrder, keep_testimony, watch_training
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
        rounds: Rounds that are kept, counted from 1; default all. Given rounds leave out every
            message that does not name its round, see `round_of`.
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
            partition = context.node_config.get("partition-id")
            order = TrainingOrder(
                run_id=context.run_id,
                round=round,
                node_id=context.node_id,
                message_id=message.metadata.message_id,
                partition=partition if isinstance(partition, int) else None,
            )
            keep_testimony(folder, steps, order, list_mods(call_next), max_bytes)
        except Exception as error:  # the app goes on without a witness
            _log.warning("fedsim.witness: what was trained on is not kept: %s", error)
        return reply

    return mod
