"""Computes what a participant of a federation learns of the others from two global models.

A participant knows the weights at which a round began, what it sent itself, and the weights at
which the next round begins. All n participants weigh the same. So the others' mean is (n m - u) /
(n - 1), with m the mean that the weights tell and u the participant's own update. It is computed in
float64; what is lost is what the weights lost when they were rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedsim.training.server import Server
from fedsim.types import Observation, Tensors, Update

_PARTS = ("update", "own_buffer", "parameter", "buffer")


def pack_round(update: Update, parameters: Tensors, buffers: Tensors) -> dict[str, Tensor]:
    """Returns what a participant keeps of a round, by name: its `update`, and the global model.

    `parameters` and `buffers` are those of the global model that the update started from. Names
    begin with `update.`, `own_buffer.`, `parameter.` or `buffer.`.
    """
    parts = zip(_PARTS, (update.tensors, update.buffers, parameters, buffers), strict=True)
    return {f"{kind}.{name}": value for kind, part in parts for name, value in part.items()}


def look(
    server: Server,
    client: int,
    round: int,
    kept: Tensors,
    parameters: Tensors,
    buffers: Tensors,
) -> Observation:
    """Returns what `client` sees of the others in `round`, assuming that all of them answered.

    The update is the others' mean. The observation's `client` is the one that looks, and its
    `num_clients` counts the others alone.

    Args:
        server: What every participant knows of the federation.
        client: Number of the participant that looks.
        round: Round whose updates made the new global model.
        kept: What the participant kept of that round (`pack_round`).
        parameters: Parameters of the new global model.
        buffers: Buffers of the new global model.

    Raises:
        FedsimError: the learner's models do not tell the mean (`Computation.told_update`).
    """
    update, own_buffers, before, old_buffers = (_under(kind, kept) for kind in _PARTS)
    others = len(server.plan(round).participants) - 1

    def without_own(mean: Tensor, own: Tensor) -> Tensor:
        # The model tells the mean over all; n means less one's own are the sum of the others.
        rest = ((others + 1) * mean.double() - own.double()) / others
        return rest.to(own.dtype)

    training = server.scale_rate(server.training, round)
    told = {
        name: server.computation.told_update(before[name], parameters[name], training)
        for name in parameters
    }
    seen = Update(
        tensors={name: without_own(told[name], update[name]) for name in parameters},
        num_examples=0,
        buffers={name: without_own(buffers[name], own) for name, own in own_buffers.items()},
    )
    return server.observation(
        round,
        client,
        seen,
        {name: before[name] for name in parameters},
        {**buffers, **old_buffers},
        num_clients=others,
        watcher="client",
    )


def _under(kind: str, kept: Tensors) -> Mapping[str, Tensor]:
    prefix = f"{kind}."
    return {n.removeprefix(prefix): value for n, value in kept.items() if n.startswith(prefix)}
