"""Provides contract suites of defenses, for a plugin's author to inherit: one for each kind.

Every test of the suite then runs on the defense that the subclass's `make` returns.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import (
    AggregationDefense,
    DataDefense,
    LossTerm,
    ModelDefense,
    NoisyAggregation,
    ServerRound,
    StatisticDefense,
    TrainingDefense,
    UpdateDefense,
    global_norm,
    shapes,
)
from fedsim.contracts.guarantee import ExactMechanism, Guarantee, Mechanism, Release
from fedsim.contracts.stack import chain
from fedsim.models.base import Classifier, build
from fedsim.models.local import gradient, loss_function
from fedsim.privacy.composition.curves import of_mechanisms
from fedsim.testing.cases import (
    BOUND,
    UPDATES,
    PluginContract,
    copy,
    example_spec,
    example_training,
    local_step,
    mixed_update,
    non_finite,
    same,
    stream,
    zeros,
)
from fedsim.types import UNKNOWN, FedsimError, LocalTraining, ReleaseKind, Tensors, Update

over_updates = pytest.mark.parametrize("make_update", UPDATES.values(), ids=UPDATES.keys())


class UpdateDefenseContract(PluginContract[UpdateDefense]):
    """Tests that what `make` returns keeps to all that an `UpdateDefense` has to."""

    @over_updates
    def test_names_shapes_and_types_are_kept_and_arguments_stay(
        self, make_update: Callable[[], dict[str, Tensor]]
    ) -> None:
        defense, update, rng = self.make(), make_update(), stream()
        state = defense.init(update, BOUND)
        for _ in range(2):
            update_before, state_before = copy(update), copy(state)
            defended, after = defense.apply(update, state, rng)
            assert same(update, update_before)
            assert same(state, state_before)
            _assert_alike(defended, update)
            assert list(defended) == list(update)
            assert shapes(after) == shapes(state)
            state = after

    @over_updates
    def test_same_stream_same_result(self, make_update: Callable[[], dict[str, Tensor]]) -> None:
        defense, update = self.make(), make_update()
        state = defense.init(update, BOUND)
        first, first_state = defense.apply(update, state, stream())
        torch.manual_seed(12345)
        second, second_state = defense.apply(update, state, stream())
        assert same(first, second)
        assert same(first_state, second_state)

    def test_integer_tensors_pass_by(self) -> None:
        update = {**mixed_update(), "counter": torch.tensor(7), "mask": torch.tensor([True, False])}
        stack = chain(_Silence(), self.make())
        state = stack.init(update, example_training())
        defended, _ = stack.apply(update, state, stream())
        assert list(defended) == list(update)
        for name in ("counter", "mask"):
            assert defended[name].dtype == update[name].dtype
            assert torch.equal(defended[name], update[name])

    def test_a_finite_update_stays_finite(self) -> None:
        defense, rng = self.make(), stream()
        for update in (mixed_update(), zeros()):
            defended, _ = defense.apply(update, defense.init(update, BOUND), rng)
            assert all(bool(tensor.isfinite().all()) for tensor in defended.values())

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_update_leaves_the_state_usable(self, value: float) -> None:
        defense, rng = self.make(), stream()
        state = defense.init(mixed_update(), BOUND)
        _, state = defense.apply(non_finite(value), state, rng)
        defended, _ = defense.apply(mixed_update(), state, rng)
        assert all(bool(tensor.isfinite().all()) for tensor in defended.values())

    @pytest.mark.parametrize("bound", [BOUND, math.inf])
    @over_updates
    def test_the_proven_bound_holds(
        self, make_update: Callable[[], dict[str, Tensor]], bound: float
    ) -> None:
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
            # One percent below the bound, since rounding to bfloat16 may lengthen an entry by 0.2%.
            update = {n: (t * (0.99 * bound / norm)).to(t.dtype) for n, t in update.items()}
        state = defense.init(update, bound)
        for _ in range(3):
            defended, state = defense.apply(update, state, rng)
            # Without a tolerance: what is proven has to hold to the last bit.
            assert float(global_norm(defended)) <= proven

    def test_a_claimed_mechanism_adds_its_noise(self) -> None:
        defense = self.make()
        mechanism = defense.guarantee(Guarantee(sensitivity=BOUND)).mechanism
        if not isinstance(mechanism, Mechanism):
            return
        entries = _noise_of(defense)
        # What it bounds itself is the contribution that its noise is a multiple of.
        own = defense.effect(Guarantee(sensitivity=BOUND)).bound
        expected = mechanism.noise_multiplier * min(BOUND, BOUND if own is None else own)
        # 40,000 draws: the sample deviation is within 0.35% of the true one, the mean within s/200
        assert float(entries.std()) > 0.98 * expected
        assert abs(float(entries.mean())) < 0.025 * float(entries.std())

    def test_a_mechanism_before_it_stands(self) -> None:
        mechanism = Mechanism(noise_multiplier=1.5, unit="client", relation="zero_out")
        before = Guarantee(sensitivity=BOUND, mechanism=mechanism)
        assert self.make().guarantee(before).mechanism == mechanism

    def test_the_declared_noise_is_added(self) -> None:
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND, shapes=_SIZES))
        assert effect != UNKNOWN, "override `effect`: say what the defense does to an update"
        entries = _noise_of(defense)
        assert {noise.on for noise in effect.noise} <= {"update"}, "a client's update is noised"
        declared = math.sqrt(sum(noise.variance for noise in effect.noise))
        if effect.removed == "others" and declared:
            entries = entries[entries != 0]  # where an entry is removed, so is its noise
        # 40,000 draws: within 0.35%, four times that for heavier tails
        assert float(entries.std()) == pytest.approx(declared, rel=0.02)
        if not effect.noise and not effect.rounded:
            update = mixed_update()
            state = defense.init(update, BOUND)
            first, second = (dict(defense.apply(update, state, stream(i))[0]) for i in (1, 2))
            # Which entries are zeroed may be drawn; those that neither has zeroed have to be equal.
            if effect.removed == "others":
                left = {name: (first[name] != 0) & (second[name] != 0) for name in update}
                first, second = (
                    {name: tensor[left[name]] for name, tensor in result.items()}
                    for result in (first, second)
                )
            assert same(first, second), "what differs by chance is noise: declare it"

    def test_removed_entries_are_declared(self) -> None:
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND))
        if effect.noisy or effect.mixed:
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
                # Equal magnitudes may fall on either side of the threshold.
                assert not len(zeroed) or not len(kept) or float(zeroed.max()) <= float(kept.min())

    def test_the_declared_scale_and_grid_are_all_that_changes(self) -> None:
        defense = self.make()
        effect = defense.effect(Guarantee(sensitivity=BOUND))
        if effect.noisy or effect.mixed:
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
        compared = {name: tensor != 0 for name, tensor in defended.items()}
        if effect.truncated is not None:
            assert all(bool((t.abs() <= effect.truncated).all()) for t in defended.values())
            compared = {n: m & (update[n].abs() < effect.truncated) for n, m in compared.items()}
        ratios = torch.cat([defended[n][m].double() / update[n][m] for n, m in compared.items()])
        one = ratios.mean() if effect.scaled else torch.ones(())
        torch.testing.assert_close(ratios, one.to(ratios).expand_as(ratios), rtol=1e-5, atol=0)
        assert 0 < float(one) <= 1 + 1e-6


_SIZES = ((30_000,), (100, 100))


def _noise_of(defense: UpdateDefense) -> Tensor:
    zero = {str(size): torch.zeros(size) for size in _SIZES}
    defended, _ = defense.apply(zero, defense.init(zero, BOUND), stream())
    return torch.cat([tensor.flatten() for tensor in defended.values()]).double()


class _Silence(UpdateDefense):
    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.bounded(BOUND)


DELTA = 1e-4


class DataDefenseContract(PluginContract[DataDefense]):
    """Tests that what `make` returns keeps to all that a `DataDefense` has to."""

    @abstractmethod
    def release(self) -> Release:
        """Returns a release for which the defense under test has a σ."""

    def test_sigma_is_a_scale(self) -> None:
        defense, release = self.make(), self.release()
        longer = replace(release, row_norm=2 * release.row_norm)
        sigma = defense.sigma(release)
        assert math.isfinite(sigma)
        assert sigma >= 0
        assert defense.sigma(release) == sigma
        assert defense.sigma(longer) == pytest.approx(2 * sigma, rel=1e-9)
        short, long = self._mechanism(release), self._mechanism(longer)
        assert short.epsilon(DELTA, 1) == pytest.approx(long.epsilon(DELTA, 1), rel=1e-6)

    def test_more_is_never_more_private(self) -> None:
        mechanism = self._mechanism(self.release())
        once = mechanism.epsilon(DELTA, 1)
        assert 0 <= once < math.inf
        assert once <= mechanism.epsilon(DELTA, 2) <= mechanism.epsilon(DELTA, 3)
        assert mechanism.epsilon(10 * DELTA, 1) <= once <= mechanism.epsilon(DELTA / 10, 1)

    def test_what_cannot_be_protected_is_refused(self) -> None:
        defense = self.make()
        refused = 0
        for kind in get_args(ReleaseKind):
            release = replace(self.release(), kind=kind)
            try:
                defense.sigma(release)
            except FedsimError:
                refused += 1
                with pytest.raises(FedsimError):
                    defense.guarantee(release)
        assert refused < len(get_args(ReleaseKind))

    def _mechanism(self, release: Release) -> ExactMechanism:
        guarantee = self.make().guarantee(release)
        mechanism = guarantee.pooled or guarantee.mechanism
        assert isinstance(mechanism, ExactMechanism)
        return mechanism


class TrainingDefenseContract(PluginContract[TrainingDefense]):
    """Tests that what `make` returns keeps to all that a `TrainingDefense` has to."""

    def test_the_training_stays_possible(self) -> None:
        for declared in (example_training(), example_training(algorithm="fedavg", steps=3)):
            training = self.make().training(declared)
            assert training.steps >= 1
            assert training.batch_size >= 1
            assert training.lr > 0
            assert 0 <= training.dropout < 1
            assert training.algorithm == "fedavg" or training.steps == 1

    def test_names_shapes_and_types_are_kept_and_arguments_stay(self) -> None:
        parameters, images, labels = _example()
        before = copy(parameters), images.clone(), labels.clone()
        direction = self.make().gradient(local_step(_cross_entropy, _plain, 3))
        step = direction(parameters, images, labels, stream())
        _assert_alike(step, parameters)
        assert all(bool(tensor.isfinite().all()) for tensor in step.values())
        assert same(parameters, before[0])
        assert torch.equal(images, before[1])
        assert torch.equal(labels, before[2])

    def test_same_stream_same_result(self) -> None:
        first, second = (
            self.make().gradient(local_step(_cross_entropy, _plain, 3)) for _ in range(2)
        )
        direction = first(*_example(), stream())
        torch.manual_seed(12345)
        assert same(direction, second(*_example(), stream()))

    def test_the_effect_is_declared(self) -> None:
        defense = self.make()
        effect = defense.effect(defense.training(example_training()))
        assert effect != UNKNOWN, "override `effect`: say what the defense does to an update"
        assert {noise.on for noise in effect.noise} <= {"step"}, "what is noised is a step"
        parameters = {_WEIGHT: torch.zeros(2, 15_000)}
        images, labels = torch.randn(3, 1, 100, 150, generator=stream(0)), torch.tensor([0, 1, 0])
        still = defense.gradient(local_step(_flat, _still, 3, *_WIDE))
        noise = still(parameters, images, labels, stream())[_WEIGHT].double()
        declared = math.sqrt(sum(noise.variance for noise in effect.noise))
        # 30,000 draws: the sample deviation is within 0.41% of the true one.
        assert float(noise.std()) == pytest.approx(declared, rel=0.02)

    def test_a_direction_that_changes_says_so(self) -> None:
        defense = self.make()
        effect = defense.effect(defense.training(example_training()))
        if effect.noise or effect.scaled_examples or not effect.exact:
            return
        parameters, images, labels = _example()
        direction = defense.gradient(local_step(_cross_entropy, _plain, 3))
        step = direction(parameters, images, labels, stream())
        expected = _plain(parameters, images, labels, stream())
        ratios = torch.cat([(step[n] / expected[n]).flatten() for n in expected])
        one = ratios.mean() if effect.scaled else torch.ones_like(ratios[0])
        torch.testing.assert_close(ratios, one.expand_as(ratios), rtol=1e-4, atol=0)

    def test_a_claimed_mechanism_adds_its_noise(self) -> None:
        defense = self.make()
        mechanism = defense.guarantee(Guarantee(), defense.training(example_training())).mechanism
        if not isinstance(mechanism, Mechanism) or mechanism.unit != "example":
            return
        parameters = {_WEIGHT: torch.zeros(2, 15_000)}
        images = torch.randn(3, 1, 100, 150, generator=stream(0))
        labels = torch.tensor([0, 1, 0])
        still = defense.gradient(local_step(_flat, _plain, 3, *_WIDE))
        noise = float(still(parameters, images, labels, stream())[_WEIGHT].double().std())
        first = defense.gradient(local_step(_steep, _plain, 3, *_WIDE))(
            parameters, images, labels, stream()
        )[_WEIGHT]
        # The gradient of `_steep` is along the image: none for zeros, opposite for its negative.
        example = images[:1] * (0 if mechanism.relation == "zero_out" else -1)
        exchanged = torch.cat([example, images[1:]])
        second = defense.gradient(local_step(_steep, _plain, 3, *_WIDE))(
            parameters, exchanged, labels, stream()
        )[_WEIGHT]
        reach = float((first.double() - second.double()).norm())
        # `noise_multiplier` is in units of C, and an exchange moves the sum by up to 2C.
        sensitivity = reach / (2 if mechanism.relation == "replace_one" else 1)
        # More noise than claimed is no fault.
        assert noise / sensitivity > 0.98 * mechanism.noise_multiplier


_WEIGHT, _BIAS = "head.output.weight", "head.output.bias"
_WIDE = ((1, 100, 150), 2)
"""Shape of an image and number of classes of a step with 30,000 weights."""


def _flat(parameters: Tensors, *_: object) -> Tensor:
    # Its gradient is zero, but exists: what comes out of the step is the noise alone.
    return parameters[_WEIGHT].sum() * 0


def _example() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    draw = stream(0)
    parameters = {_WEIGHT: torch.randn(5, 4, generator=draw), _BIAS: torch.randn(5, generator=draw)}
    return parameters, torch.randn(3, 1, 2, 2, generator=draw), torch.tensor([0, 3, 3])


def _cross_entropy(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    logits = images.flatten(1) @ parameters[_WEIGHT].T + parameters[_BIAS]
    return torch.nn.functional.cross_entropy(logits, labels)


def _steep(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    scores = (images.flatten(1) * parameters[_WEIGHT][labels]).sum(1)
    # Far above any bound, so that clipping takes each example's gradient to the bound itself.
    return 1e6 * scores.mean()


def _still(parameters: Tensors, *_: object) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in parameters.items()}


def _plain(
    parameters: Tensors, images: Tensor, labels: Tensor, _: torch.Generator
) -> dict[str, Tensor]:
    at = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    grads = torch.autograd.grad(_cross_entropy(at, images, labels), list(at.values()))
    return dict(zip(at, grads, strict=True))


STATISTIC_DELTA = 1e-2
STATISTIC_RELEASE = Release(
    kind="kernel_regression",
    row_norm=1.0,
    columns=0,
    features=6,
    statistics=("features", "kernel"),
    gain=1.5,
)
_DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=1.0)


class StatisticDefenseContract(PluginContract[StatisticDefense]):
    """Tests that what `make` returns keeps to all that a `StatisticDefense` has to."""

    def test_shape_type_and_kind_are_kept(self) -> None:
        value = self._value()
        before = value.clone()
        statistic = self.make().apply(value, STATISTIC_RELEASE, stream())
        assert torch.equal(value, before), "the client computes with it again"
        assert statistic.shape == value.shape
        assert statistic.dtype == value.dtype
        assert bool(statistic.isfinite().all())
        if self.make().statistic == "kernel":
            torch.testing.assert_close(statistic, statistic.T)
            smallest = float(torch.linalg.eigvalsh((statistic + statistic.T) / 2)[0])
            # Rounding moves the eigenvalue 0 by a share of the largest entry.
            assert smallest > -1e-9 * (1 + float(statistic.abs().max()))

    def test_same_stream_same_result(self) -> None:
        value = self._value()
        first = self.make().apply(value, STATISTIC_RELEASE, stream())
        torch.manual_seed(12345)
        assert torch.equal(first, self.make().apply(value, STATISTIC_RELEASE, stream()))
        assert not torch.equal(first, self.make().apply(value, STATISTIC_RELEASE, stream(2)))

    def test_the_curve_is_one_of_privacy(self) -> None:
        mechanism = self.make().guarantee(STATISTIC_RELEASE)
        epsilons = np.linspace(0.0, 4.0, 33)
        deltas = np.exp(mechanism.log_delta(epsilons))
        assert ((deltas >= 0) & (deltas <= 1)).all()
        # The tolerance is for rounding between neighbouring ε.
        assert (np.diff(deltas) <= 1e-12).all()
        epsilon = of_mechanisms((mechanism,), STATISTIC_DELTA)
        assert float(np.exp(mechanism.log_delta(np.array([epsilon])))[0]) <= STATISTIC_DELTA * (
            1 + 1e-9
        )

    def test_more_is_never_more_private(self) -> None:
        one = (self.make().guarantee(STATISTIC_RELEASE),)
        once = of_mechanisms(one, STATISTIC_DELTA)
        assert 0 <= once <= of_mechanisms(one * 2, STATISTIC_DELTA)
        assert (
            of_mechanisms(one, 10 * STATISTIC_DELTA)
            <= once
            <= of_mechanisms(one, STATISTIC_DELTA / 2)
        )

    def test_it_stands_only_where_there_is_such_a_statistic(self) -> None:
        stack = chain(self.make())
        stack.guarantees(_DECLARED, STATISTIC_RELEASE)
        for release in (None, replace(STATISTIC_RELEASE, statistics=())):
            with pytest.raises(FedsimError, match="learner"):
                stack.guarantees(_DECLARED, release)
        with pytest.raises(FedsimError, match="alone of its kind"):
            chain(self.make(), self.make())

    def _value(self) -> Tensor:
        rows = torch.randn(9, STATISTIC_RELEASE.features, generator=stream(), dtype=torch.float64)
        rows /= rows.norm(dim=1, keepdim=True)
        # The entrywise square of a Gram matrix is positive semidefinite as well (Schur).
        return (rows @ rows.T) ** 2 if self.make().statistic == "kernel" else rows


class AggregationDefenseContract(PluginContract[AggregationDefense]):
    """Tests that what `make` returns keeps to all that an `AggregationDefense` has to."""

    def test_one_update_alone_comes_out_as_it_is(self) -> None:
        update = _updates()[0]
        _assert_close(self.make().combine([update]), update)

    def test_names_shapes_types_and_total(self) -> None:
        updates, before = _updates(), _updates()
        combined = self.make().combine(iter(updates))
        _assert_alike(_every(combined), _every(updates[0]))
        assert combined.num_examples == sum(update.num_examples for update in updates)
        for tensor in _every(combined).values():
            # Writing into the result must not reach the clients' own updates.
            tensor.zero_()
        for update, unchanged in zip(updates, before, strict=True):
            assert same(_every(update), _every(unchanged))

    def test_the_order_of_clients_does_not_matter(self) -> None:
        updates = _updates()
        _assert_close(self.make().combine(updates), self.make().combine(updates[::-1]))

    def test_small_updates_are_not_lost(self) -> None:
        # Float masks leave an error of their own size times 1e-7, which drowns such updates.
        small = [
            replace(
                update,
                tensors={name: 1e-6 * tensor for name, tensor in update.tensors.items()},
                buffers={name: 1e-6 * tensor for name, tensor in update.buffers.items()},
            )
            for update in _updates()
        ]
        combined = self.make().combine(small)
        assert same(_every(combined), _every(self.make().combine(small)))
        large = _every(self.make().combine(_updates()))
        for name, tensor in _every(combined).items():
            torch.testing.assert_close(1e6 * tensor, large[name], rtol=1e-4, atol=1e-4)

    def test_the_effect_is_declared(self) -> None:
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
        # A mean over five clients is shown, and the effect is declared of their sum.
        assert float(5 * shown.std()) == pytest.approx(math.sqrt(sum(variances)), rel=0.02)

    def test_no_update_is_an_error(self) -> None:
        with pytest.raises(FedsimError):
            self.make().combine([])

    def test_nothing_is_proven_from_nothing(self) -> None:
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

    # Unequal numbers of examples, so that a weighted mean differs from a plain one.
    return [one(1, 5), one(2, 1), one(3, 40)]


def _assert_alike(tensors: Tensors, like: Tensors) -> None:
    kinds = [{n: (t.shape, t.dtype) for n, t in each.items()} for each in (tensors, like)]
    assert kinds[0] == kinds[1]


def _every(update: Update) -> dict[str, Tensor]:
    parts = {"tensor": update.tensors, "buffer": update.buffers}
    return {f"{part} {n}": tensor for part, held in parts.items() for n, tensor in held.items()}


def _assert_close(a: Update, b: Update) -> None:
    torch.testing.assert_close(_every(a), _every(b), rtol=1e-5, atol=1e-6)


_CLASSES = 5
_ALTERED = example_spec((1, 4, 4), _CLASSES, hidden=[8])


class ModelDefenseContract(PluginContract[ModelDefense]):
    """Tests that what `make` returns keeps to all that a `ModelDefense` has to."""

    def test_the_altered_model_classifies(self) -> None:
        images, _ = _images()
        before = images.clone()
        for training in (True, False):
            model = self._build().train(training)
            logits = model(images)
            assert logits.shape == (len(images), _CLASSES)
            assert bool(logits.isfinite().all())
            assert model.features(images).dim() == 2
        assert torch.equal(images, before)

    def test_an_attacker_builds_the_same_model(self) -> None:
        defense = self.make()
        again = type(defense).model_validate(defense.model_dump(mode="json"))
        first, second = self._build().state_dict(), build(_ALTERED, 1, [again]).state_dict()
        assert same(first, second)
        # The defense may rename parts, so that weights are found by value.
        for value in build(_ALTERED, 1).body.state_dict().values():
            assert any(torch.equal(value, other) for other in first.values())

    def test_every_weight_is_trained(self) -> None:
        model = self._build()
        parameters = dict(model.named_parameters())
        loss = loss_function(model, dict(model.named_buffers()), example_training())
        with rng.global_stream(2):
            grads = gradient(loss, parameters, *_images())
        assert all(grad.shape == parameters[name].shape for name, grad in grads.items())
        assert all(bool(grad.isfinite().all()) for grad in grads.values())

    def test_loss_terms_are_means_over_examples(self) -> None:
        model = self._build().eval()
        images, _ = _images()
        for layer in model.modules():
            if isinstance(layer, LossTerm):
                model(images)
                whole = layer.loss_term()
                assert whole.shape == ()
                assert bool(whole.isfinite())
                parts = []
                for image in images:
                    model(image[None])
                    parts.append(layer.loss_term())
                torch.testing.assert_close(whole, torch.stack(parts).mean())

    def test_the_effect_is_declared(self) -> None:
        effect = self.make().effect(example_training())
        assert effect != UNKNOWN, "override `effect`: say what the defense does to an update"
        assert effect.drawn == self._differs(training=True)
        assert not self._differs(training=False)

    def _differs(self, training: bool) -> bool:
        model, (images, _) = self._build().train(training), _images()
        logits = []
        # The first two tell whether all chance is of the stream, the last whether there is any.
        for seed in (2, 2, 3):
            with rng.global_stream(seed):
                logits.append(model(images).detach())
        assert torch.equal(logits[0], logits[1])
        return not torch.equal(logits[0], logits[2])

    def _build(self) -> Classifier:
        return build(_ALTERED, 1, [self.make()])


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 1, 4, 4, generator=stream(0)), torch.tensor([0, 3, 3])
