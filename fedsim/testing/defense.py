"""Tests defenses that act on updates: the contract suite of `UpdateDefense`.

    class TestMyDefense(UpdateDefenseContract):
        def make(self) -> MyDefense:
            return MyDefense(strength=0.5)

Every test of the suite then runs on the defense that `make` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedsim.contracts.defense import (
    UpdateDefense,
    global_norm,
    shapes,
)
from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.contracts.stack import chain
from fedsim.testing.plugin import PluginContract
from fedsim.testing.updates import (
    BOUND,
    UPDATES,
    copy,
    example_training,
    mixed,
    non_finite,
    same,
    stream,
    zeros,
)
from fedsim.types import UNKNOWN, FedsimError, Tensors

over_updates = pytest.mark.parametrize("make_update", UPDATES.values(), ids=UPDATES.keys())


class UpdateDefenseContract(PluginContract[UpdateDefense]):
    """Tests what every `UpdateDefense` keeps to."""

    @over_updates
    def test_names_shapes_and_types_are_kept(
        self, make_update: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Holds for the update, and for the state over two rounds."""
        defense, update, rng = self.make(), make_update(), stream()
        state = defense.init(update, BOUND)
        for _ in range(2):
            defended, after = defense.apply(update, state, rng)
            assert shapes(defended) == shapes(update)
            assert list(defended) == list(update)
            assert {n: t.dtype for n, t in defended.items()} == {
                n: t.dtype for n, t in update.items()
            }
            assert shapes(after) == shapes(state)
            state = after

    @over_updates
    def test_arguments_are_not_changed(self, make_update: Callable[[], dict[str, Tensor]]) -> None:
        """Neither the update nor the state changes, in a first and a second round."""
        defense, update, rng = self.make(), make_update(), stream()
        state = defense.init(update, BOUND)
        for _ in range(2):
            update_before, state_before = copy(update), copy(state)
            _, after = defense.apply(update, state, rng)
            assert same(update, update_before)
            assert same(state, state_before)
            state = after

    @over_updates
    def test_same_stream_same_result(self, make_update: Callable[[], dict[str, Tensor]]) -> None:
        """The stream that is handed in is the only source of randomness."""
        defense, update = self.make(), make_update()
        state = defense.init(update, BOUND)
        first, first_state = defense.apply(update, state, stream())
        torch.manual_seed(12345)
        second, second_state = defense.apply(update, state, stream())
        assert same(first, second)
        assert same(first_state, second_state)

    def test_integer_tensors_pass_by(self) -> None:
        """Counters and masks pass a chain bit for bit."""
        update = {**mixed(), "counter": torch.tensor(7), "mask": torch.tensor([True, False])}
        stack = chain(_Silence(), self.make())
        state = stack.init(update, example_training())
        defended, _ = stack.apply(update, state, stream())
        assert list(defended) == list(update)
        for name in ("counter", "mask"):
            assert defended[name].dtype == update[name].dtype
            assert torch.equal(defended[name], update[name])

    def test_a_finite_update_stays_finite(self) -> None:
        """Holds for zero norms, too."""
        defense, rng = self.make(), stream()
        for update in (mixed(), zeros()):
            defended, _ = defense.apply(update, defense.init(update, BOUND), rng)
            assert all(bool(tensor.isfinite().all()) for tensor in defended.values())

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_update_leaves_the_state_usable(self, value: float) -> None:
        """One bad round does not spoil all later ones."""
        defense, rng = self.make(), stream()
        state = defense.init(mixed(), BOUND)
        _, state = defense.apply(non_finite(value), state, rng)
        defended, _ = defense.apply(mixed(), state, rng)
        assert all(bool(tensor.isfinite().all()) for tensor in defended.values())

    @pytest.mark.parametrize("bound", [BOUND, math.inf])
    @over_updates
    def test_the_proven_bound_holds(
        self, make_update: Callable[[], dict[str, Tensor]], bound: float
    ) -> None:
        """No update comes out longer than the guarantee says, in three rounds."""
        defense, rng = self.make(), stream()
        try:
            proven = defense.guarantee(Guarantee(sensitivity=bound)).sensitivity
        except FedsimError:
            assert math.isinf(bound), "only a missing bound may be refused"
            return
        if math.isinf(proven):
            return
        update = make_update()
        norm = float(global_norm(update))
        if math.isfinite(bound) and not norm <= bound:
            if not math.isfinite(norm):
                return
            update = {n: (t * (0.99 * bound / norm)).to(t.dtype) for n, t in update.items()}
        state = defense.init(update, bound)
        for _ in range(3):
            defended, state = defense.apply(update, state, rng)
            assert float(global_norm(defended)) <= proven

    def test_a_claimed_mechanism_adds_its_noise(self) -> None:
        """On a zero update, what comes out is the noise: as strong as claimed, around zero."""
        defense = self.make()
        mechanism = defense.guarantee(Guarantee(sensitivity=BOUND)).mechanism
        if not isinstance(mechanism, Mechanism):
            return
        update = {"a": torch.zeros(30_000), "b": torch.zeros(100, 100)}
        defended, _ = defense.apply(update, defense.init(update, BOUND), stream())
        entries = torch.cat([tensor.flatten() for tensor in defended.values()]).double()
        expected = mechanism.noise_multiplier * BOUND
        # 40,000 draws: the sample deviation is within 0.35% of the true one, the mean within s/200
        assert float(entries.std()) > 0.98 * expected
        assert abs(float(entries.mean())) < 0.025 * float(entries.std())

    def test_a_mechanism_before_it_stands(self) -> None:
        """What comes after a release is post-processing."""
        mechanism = Mechanism(noise_multiplier=1.5, unit="client", relation="zero_out")
        before = Guarantee(sensitivity=BOUND, mechanism=mechanism)
        assert self.make().guarantee(before).mechanism == mechanism

    def test_the_effect_is_declared(self) -> None:
        """Attacks are weaker against a defense that does not say what it does."""
        assert self.make().effect(Guarantee(sensitivity=BOUND)) != UNKNOWN, (
            "override `effect`: say what the defense does to an update"
        )

    def test_the_declared_noise_is_added(self) -> None:
        """A zero update comes out with that variance; without noise, what is left is equal.

        Which entries are removed may be drawn, where `removed` is "others".
        """
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND))
        zero = {"a": torch.zeros(30_000), "b": torch.zeros(100, 100)}
        defended, _ = defense.apply(zero, defense.init(zero, BOUND), stream())
        entries = torch.cat([tensor.flatten() for tensor in defended.values()]).double()
        assert {noise.on for noise in effect.noise} <= {"update"}, "a client's update is noised"
        declared = math.sqrt(sum(noise.variance for noise in effect.noise))
        # 40,000 draws: within 0.35%, four times that for heavier tails
        assert float(entries.std()) == pytest.approx(declared, rel=0.02)
        if not effect.noise and not effect.rounded:
            update = mixed()
            state = defense.init(update, BOUND)
            first, second = (dict(defense.apply(update, state, stream(i))[0]) for i in (1, 2))
            if effect.removed == "others":
                left = {name: (first[name] != 0) & (second[name] != 0) for name in update}
                first, second = (
                    {name: tensor[left[name]] for name, tensor in result.items()}
                    for result in (first, second)
                )
            assert same(first, second), "what differs by chance is noise: declare it"

    def test_removed_entries_are_declared(self) -> None:
        """The removed entries are the smallest, if that is the rule."""
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND))
        if effect.noise or effect.mixed:
            return
        update = {
            "a": torch.randn(300, generator=stream(1)),
            "b": torch.randn(20, generator=stream(2)),
        }
        defended, _ = defense.apply(update, defense.init(update, BOUND), stream())
        removed = {name: (tensor == 0) & (update[name] != 0) for name, tensor in defended.items()}
        if effect.removed is None:
            assert effect.rounded or not any(bool(mask.any()) for mask in removed.values())
        elif effect.removed != "others":
            parts = [[name] for name in update]
            for names in parts if effect.removed == "smallest_of_tensor" else [list(update)]:
                zeroed = torch.cat([update[n][removed[n]].abs() for n in names])
                kept = torch.cat([update[n][~removed[n]].abs() for n in names])
                assert not len(zeroed) or not len(kept) or float(zeroed.max()) <= float(kept.min())

    def test_the_declared_scale_and_grid_are_all_that_changes(self) -> None:
        """The result is the update, a multiple of it, or on a grid of its tensor."""
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND))
        if effect.noise or effect.mixed:
            return
        update = {"a": 50 * torch.randn(300, generator=stream(1)), "b": torch.full((3,), 7.0)}
        defended, _ = defense.apply(update, defense.init(update, BOUND), stream())
        if effect.bound is not None:
            assert float(global_norm(defended)) <= effect.bound * (1 + 1e-6)
        left = {name: tensor[tensor != 0] for name, tensor in defended.items()}
        if effect.rounded:
            for name in left:
                steps = left[name].double() / left[name].double().abs().min()
                assert float((steps - steps.round()).abs().max()) < 0.05, "no grid"
            return
        ratios = torch.cat([left[n].double() / update[n][defended[n] != 0] for n in update])
        one = ratios.mean() if effect.scaled else torch.ones(())
        torch.testing.assert_close(ratios, one.to(ratios).expand_as(ratios), rtol=1e-5, atol=0)
        assert 0 < float(one) <= 1 + 1e-6


class _Silence(UpdateDefense):
    """Proves a bound by releasing zeros."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.bounded(BOUND)
