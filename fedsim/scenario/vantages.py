"""Refuses vantages from which it is not defined what is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedsim.contracts.defense import AggregationDefense, SecureAggregation
from fedsim.scenario.build import build_stack
from fedsim.scenario.location import KeyPath
from fedsim.scenario.model import Federation, Observe, PluginRef, Training
from fedsim.types import FedsimError


def check(
    observe: Observe,
    training: Training | None,
    federation: Federation | None,
    stacks: Mapping[str, Sequence[PluginRef]],
    *,
    trains: bool,
) -> Iterator[tuple[KeyPath, str]]:
    """Yields every problem with `observe.vantages`, of sections that are valid in themselves.

    Args:
        observe: Who looks at what.
        training: None if it is not valid.
        federation: None if it is not valid.
        stacks: The defenses that are valid.
        trains: Whether the learner trains a model.
    """
    if "client" in observe.vantages:
        yield from _participants(observe, training, federation, trains=trains)
        for name, refs in stacks.items():
            if (aggregation := _aggregation(refs)) and not aggregation.averages:
                yield (
                    ("defenses", name),
                    f"{refs[-1].name} does not say that its combination is a mean, from which a "
                    "participant could take its own update off; drop it, or client from "
                    "observe.vantages",
                )
    if "eavesdropper" in observe.vantages and federation and not federation.tls:
        for name, refs in stacks.items():
            aggregation = _aggregation(refs)
            if aggregation and not isinstance(aggregation, SecureAggregation):
                yield (
                    ("defenses", name),
                    f"{refs[-1].name} is an ideal, which says what the server sees and not what "
                    "crosses a wire in plaintext; drop it, or eavesdropper from observe.vantages, "
                    "or use federation.tls: true",
                )


def _participants(
    observe: Observe, training: Training | None, federation: Federation | None, *, trains: bool
) -> Iterator[tuple[KeyPath, str]]:
    path = ("observe", "vantages", observe.vantages.index("client"))
    if not trains:
        yield path, "the learner trains no global model that a participant could see; drop client"
    if observe.batch_sizes is not None:
        yield (
            path,
            "no probe goes into the global model that a participant sees; drop client, or remove "
            "observe.batch_sizes, so that the training itself is observed",
        )
    if federation and federation.strategy != "FedAvg":
        yield (
            path,
            f"the global model of {federation.strategy} does not tell the clients' mean; drop "
            "client, or use federation.strategy: FedAvg",
        )
    for index, number in enumerate(observe.rounds):
        if training and number in ("last", training.rounds):
            yield (
                ("observe", "rounds", index),
                f"no participant receives the global model after the last round ({training.rounds})"
                ", by which it would see that round (observe.vantages: client); observe an earlier "
                "one, or train a round longer",
            )


def _aggregation(refs: Sequence[PluginRef]) -> AggregationDefense | None:
    """The aggregation of a stack, if it has one and can be built."""
    try:
        return build_stack(refs).aggregation
    except FedsimError:
        return None
