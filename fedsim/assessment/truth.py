"""Which exchanges are attacked, what their clients really trained on, and what a guess knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedsim import scoring
from fedsim.recording.exchanges import Exchange
from fedsim.recording.witnessed import Testimony
from fedsim.types import FedsimError
from fedsim.words import number_of

# Distance that pixels may lie outside of [0, 1] once the normalization is undone.
_ROUNDING = 0.02


@dataclass(frozen=True)
class Picked:
    """An exchange that is attacked, with its truth (`testimony`)."""

    exchange: Exchange
    testimony: Testimony
    number: int
    """The client's partition-id where all nodes have one of their own, else its node's place."""


def pick(
    exchanges: Sequence[Exchange],
    said: Mapping[str, Testimony],
    rounds: Collection[int] | Literal["last"],
    clients: int,
) -> list[Picked]:
    """Returns the exchanges that are attacked, sorted by round and the client's number.

    `said` has, by message id, what a witness saw. `rounds` may be "last" for the last one with
    truth; others without truth are passed over. Of each round the first `clients` by number are
    attacked. A FedsimError says where there are none, or a witness left out images of one.
    """
    known = [each for each in exchanges if each.message_id in said]
    if not known:
        raise FedsimError(
            f"--truth: nothing was witnessed of any of {number_of(len(exchanges), 'exchange')} of "
            "this recording; name the folder that fedsim.witness wrote to during the same run"
        )
    wanted = {known[-1].round} if rounds == "last" else set(rounds)
    numbers = _numbers(exchanges, said)
    picked: list[Picked] = []
    for round in sorted(wanted):
        own = sorted((e for e in known if e.round == round), key=lambda e: numbers[e.node_id])
        picked += [Picked(e, said[e.message_id], numbers[e.node_id]) for e in own[:clients]]
    if not picked:
        there = sorted({each.round for each in known})
        raise FedsimError(f"rounds: expected some of {there}, got {sorted(wanted)}")
    for each in picked:
        if each.testimony.said.left_out:
            raise FedsimError(
                f"{each.testimony.path}: the witness left out "
                f"{number_of(each.testimony.said.left_out, 'image')}, so that the truth is not "
                "whole; give fedsim.witness a larger max_images, or attack another client"
            )
    return picked


def _numbers(exchanges: Sequence[Exchange], said: Mapping[str, Testimony]) -> Mapping[int, int]:
    """Numbers the nodes by their partition-ids where all have one of their own, else in order."""
    nodes = sorted({each.node_id for each in exchanges})
    partitions = {t.said.node_id: t.said.partition for t in said.values()}
    known = [partitions.get(node) for node in nodes]
    given = [number for number in known if number is not None and 0 <= number < 1_000_000]
    if len(given) == len(nodes) == len(set(given)):
        return dict(zip(nodes, given, strict=True))
    return {node: place for place, node in enumerate(nodes)}


@dataclass(frozen=True)
class Examples:
    """Reads what clients trained on, and undoes the app's normalization."""

    mean: Sequence[float] | None
    std: Sequence[float] | None
    classes: int

    def read(self, testimony: Testimony) -> tuple[Tensor, Tensor]:
        """Returns pixels in [0, 1] (N, C, H, W) and labels (N,), or refuses what is neither."""
        images, labels = testimony.images()
        outside = labels[(labels < 0) | (labels >= self.classes)]
        if len(outside):
            raise FedsimError(
                f"{testimony.path}: expected labels from 0 to {self.classes - 1}, as the model has "
                f"{self.classes} outputs, got {int(outside[0])}; name the model that the app "
                "trains (--model), and its outputs (--classes)"
            )
        return self._pixels(images, testimony.path), labels

    def _pixels(self, images: Tensor, what: Path) -> Tensor:
        for option, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != images.shape[1]:
                raise FedsimError(
                    f"{option}: expected {number_of(images.shape[1], 'number')}, one a channel, "
                    f"got {len(values)}"
                )
        std = torch.tensor([float(each) for each in self.std or (1.0,)]).view(1, -1, 1, 1)
        mean = torch.tensor([float(each) for each in self.mean or (0.0,)]).view(1, -1, 1, 1)
        pixels = images * std + mean
        low, high = float(pixels.min()), float(pixels.max())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise FedsimError(
                f"{what}: pixels are {low:.3g} to {high:.3g} with this mean and std, and not in "
                "[0, 1]; say what the app normalizes by (--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5)"
            )
        return pixels.clamp(0, 1)


def guesser_of(
    said: Mapping[str, Testimony], picked: Sequence[Picked], examples: Examples, notes: list[str]
) -> tuple[scoring.Guesser, bool]:
    """Learns the zero-information guess from clients that are not `picked`, if there are any.

    Else it is learned from the victims' own images, and `notes` get a caution. Also returns which.
    """
    victims = {each.exchange.node_id for each in picked}
    # One testimony per client, so that its images do not count once for each round.
    others = {t.said.node_id: t for t in said.values() if t.said.node_id not in victims}
    pool = list(others.values()) or [each.testimony for each in picked]
    images, labels = zip(*(examples.read(each) for each in pool), strict=True)
    if not others:
        notes.append(
            "guess: learned from the victims' own images, as no other client was witnessed; gains "
            "over it are understated; run the app with more clients than are attacked"
        )
    # The guess is learned from 8-bit levels, as data sets hold them.
    levels = (torch.cat(images) * 255).round().to(torch.uint8)
    return scoring.Guesser(levels, torch.cat(labels)), bool(others)
