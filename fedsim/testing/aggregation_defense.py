"""Tests defenses that combine updates: the contract suite of `AggregationDefense`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedsim.contracts.defense import (
    AggregationDefense,
    NoisyAggregation,
    ServerRound,
    shapes,
)
from fedsim.contracts.guarantee import Guarantee
from fedsim.testing.plugin import PluginContract
from fedsim.testing.updates import (
    BOUND,
    copy,
    same,
    stream,
)
from fedsim.types import UNKNOWN, FedsimError, Tensors, Update


class AggregationDefenseContract(PluginContract[AggregationDefense]):
    """Tests what every `AggregationDefense` keeps to."""

    def test_one_update_alone_comes_out_as_it_is(self) -> None:
        """A single update changes by no more than rounding."""
        update = _updates()[0]
        combined = self.make().combine([update])
        _assert_close(combined.tensors, update.tensors)
        _assert_close(combined.buffers, update.buffers)

    def test_names_shapes_types_and_total(self) -> None:
        """The combined update fits the model and counts every example."""
        updates = _updates()
        combined = self.make().combine(iter(updates))
        for tensors, like in ((combined.tensors, "tensors"), (combined.buffers, "buffers")):
            expected: Tensors = getattr(updates[0], like)
            assert shapes(tensors) == shapes(expected)
            assert {n: t.dtype for n, t in tensors.items()} == {
                n: t.dtype for n, t in expected.items()
            }
        assert combined.num_examples == sum(update.num_examples for update in updates)

    def test_the_order_of_clients_does_not_matter(self) -> None:
        """Order changes the result by no more than rounding."""
        updates = _updates()
        combined = self.make().combine(updates)
        reversed_order = self.make().combine(updates[::-1])
        _assert_close(combined.tensors, reversed_order.tensors)
        _assert_close(combined.buffers, reversed_order.buffers)

    def test_small_updates_are_not_lost(self) -> None:
        """Integer masks cancel exactly, so small updates survive and results repeat bit for bit.

        Float masks that cancel leave an error of their own size times 1e-7, which drowns an update
        of 1e-6 and differs from one call to the next.
        """
        small = [
            replace(
                update,
                tensors={name: 1e-6 * tensor for name, tensor in update.tensors.items()},
                buffers={name: 1e-6 * tensor for name, tensor in update.buffers.items()},
            )
            for update in _updates()
        ]
        combined = self.make().combine(small)
        second = self.make().combine(small)
        assert same(combined.tensors, second.tensors)
        assert same(combined.buffers, second.buffers)
        large = self.make().combine(_updates())
        for tensors, expected in (
            (combined.tensors, large.tensors),
            (combined.buffers, large.buffers),
        ):
            for name, tensor in tensors.items():
                torch.testing.assert_close(1e6 * tensor, expected[name], rtol=1e-4, atol=1e-4)

    def test_arguments_are_not_changed(self) -> None:
        """The result shares no memory with the updates."""
        updates = _updates()
        before = [(copy(update.tensors), copy(update.buffers)) for update in updates]
        combined = self.make().combine(updates)
        for tensor in (*combined.tensors.values(), *combined.buffers.values()):
            tensor.zero_()
        for update, (tensors, buffers) in zip(updates, before, strict=True):
            assert same(update.tensors, tensors)
            assert same(update.buffers, buffers)

    def test_the_effect_is_declared(self) -> None:
        """The declared noise is what a server adds to the sum."""
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND))
        assert effect != UNKNOWN, "override `effect`: say what is added to the combination"
        assert {noise.on for noise in effect.noise} <= {"sum"}, "what is noised is the sum"
        if not isinstance(defense, NoisyAggregation):
            assert not effect.noise, "a plain combination adds nothing"
            return
        zero = Update(tensors={"weight": torch.zeros(40_000)}, num_examples=1)
        variances = [noise.variance for noise in effect.noise]
        round = ServerRound(clients=5, sensitivity=BOUND, stream=stream(), before=None)
        shown = defense.add_noise(zero, round).tensors["weight"].double()
        assert float(5 * shown.std()) == pytest.approx(math.sqrt(sum(variances)), rel=0.02)

    def test_no_update_is_an_error(self) -> None:
        """A round in which every client failed combines to nothing."""
        with pytest.raises(FedsimError):
            self.make().combine([])

    def test_nothing_is_proven_from_nothing(self) -> None:
        """Without noise anywhere, or without a bound, there is no mechanism."""
        try:
            assert self.make().guarantee(Guarantee()).mechanism is None
        except FedsimError as refused:
            assert "bound" in str(refused), "only a missing bound may be refused"


def _updates() -> list[Update]:
    def one(seed: int, num_examples: int) -> Update:
        draw = stream(seed)
        return Update(
            tensors={
                "weight": torch.randn(3, 2, generator=draw),
                "double": torch.randn(4, generator=draw, dtype=torch.float64),
                "scalar": torch.randn((), generator=draw),
                "empty": torch.zeros(0, 2),
            },
            num_examples=num_examples,
            buffers={"running_mean": torch.randn(3, generator=draw)},
        )

    return [one(1, 5), one(2, 1), one(3, 40)]


def _assert_close(a: Tensors, b: Tensors) -> None:
    torch.testing.assert_close(dict(a), dict(b), rtol=1e-5, atol=1e-6)
