"""Clip, pruning, quantization, top-k, noise, dropout, local steps: formulas, counts, refusals."""

from __future__ import annotations

import math
from fractions import Fraction

import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import global_norm
from fedsim.contracts.stack import chain
from fedsim.models.local import gradient, loss_function
from fedsim.models.mlp import MLP
from fedsim.testing.cases import mixed_update, non_finite, same, stream
from fedsim.types import FedsimError, LocalTraining
from fedsim_defenses.clip import Clip
from fedsim_defenses.dropout import Dropout
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.gradient_pruning import GradientPruning
from fedsim_defenses.quantization import Quantization
from fedsim_defenses.top_k import TopK

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def clipped(update: dict[str, Tensor], norm: float) -> dict[str, Tensor]:
    return dict(Clip(norm=norm).apply(update, {}, stream())[0])


def test_clip_is_its_formula() -> None:
    update = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0, 0.0]])}
    found = clipped(update, 2.5)
    torch.testing.assert_close(found["a"], torch.tensor([1.5]))
    torch.testing.assert_close(found["b"], torch.tensor([[2.0, 0.0]]))
    assert same(clipped(update, 5.0), update)


@settings(max_examples=60, deadline=None)
@given(
    norm=st.floats(1e-9, 1e9),
    scale=st.floats(1e-3, 1e4),
    seed=st.integers(0, 2**20),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_the_bound_holds_after_rounding_and_clipping_twice_is_clipping_once(
    norm: float, scale: float, seed: int, size: int, dtype: torch.dtype
) -> None:
    update = {"a": (scale * torch.randn(size, generator=stream(seed))).to(dtype)}
    once = clipped(update, norm)
    assert float(global_norm(once)) <= norm
    assert same(clipped(once, norm), once)


def test_a_norm_beyond_single_precision_is_still_a_norm() -> None:
    found = clipped({"a": torch.full((4,), 1e30)}, 1.0)
    torch.testing.assert_close(found["a"], torch.full((4,), 0.5))


def pruned(update: dict[str, Tensor], **parameters: object) -> dict[str, Tensor]:
    return dict(GradientPruning(**parameters).apply(update, {}, stream())[0])


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.decimals(0, 1, places=3).filter(lambda value: value < 1),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    levels=st.sampled_from([0, 1, 3]),
)
def test_exactly_floor_of_ratio_n_smallest_entries_become_zero(
    ratio: object, sizes: list[int], seed: int, levels: int
) -> None:
    rng = stream(seed)
    update = {str(i): torch.randn(size, generator=rng) for i, size in enumerate(sizes)}
    if levels:  # few distinct magnitudes: many ties
        update = {n: (t.sign() * (t.abs() * levels).ceil()) for n, t in update.items()}
    found = pruned(update, ratio=float(ratio))  # type: ignore[arg-type]
    before, after = torch.cat([*update.values()]), torch.cat([*found.values()])
    gone = (after == 0) & (before != 0)
    count = math.floor(Fraction(str(ratio)) * len(before))
    assert int(gone.sum()) == count - min(count, int((before == 0).sum()))
    assert torch.equal(after[~gone], before[~gone])
    if gone.any() and (~gone & (after != 0)).any():
        assert before[gone].abs().max() <= after[after != 0].abs().min()


def test_the_scopes_of_pruning_differ() -> None:
    update = {"small": torch.tensor([1.0, 2.0]), "large": torch.tensor([30.0, 40.0])}
    everywhere = pruned(update, ratio=0.5)
    assert everywhere["small"].tolist() == [0.0, 0.0]
    assert everywhere["large"].tolist() == [30.0, 40.0]
    each = pruned(update, ratio=0.5, scope="tensor")
    assert each["small"].tolist() == [0.0, 2.0]
    assert each["large"].tolist() == [0.0, 40.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_entries_that_are_not_finite_count_as_the_largest(value: float) -> None:
    found = pruned({"a": torch.tensor([5.0, value, 6.0, 7.0])}, ratio=0.75)
    assert same(found, {"a": torch.tensor([0.0, value, 0.0, 0.0])})


def quantized(tensor: Tensor, seed: int = 1, **parameters: object) -> Tensor:
    return Quantization(**parameters).apply({"a": tensor}, {}, stream(seed))[0]["a"]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 16),
    rounding=st.sampled_from(["deterministic", "stochastic"]),
    scale=st.floats(1e-30, 1e30),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_error_is_bounded_and_the_levels_are_few(
    bits: int, rounding: str, scale: float, seed: int, dtype: torch.dtype
) -> None:
    tensor = scale * torch.randn(200, generator=stream(seed), dtype=dtype)
    found = quantized(tensor, bits=bits, rounding=rounding).double()
    spacing = float(tensor.abs().max()) / (2 ** (bits - 1) - 1)
    slack = 1e-6 * float(tensor.abs().max())  # float32's own rounding
    error = (found - tensor.double()).abs().max()
    assert float(error) <= (spacing / 2 if rounding == "deterministic" else spacing) + slack
    assert found.unique().numel() <= 2**bits - 1
    assert float(found.abs().max()) <= float(tensor.abs().max()) + slack


def test_stochastic_rounding_is_unbiased_and_nearest_rounding_is_not() -> None:
    tensor = torch.tensor([1.0, 0.26, -0.26, 0.5, -0.9]).repeat(40_000, 1)
    found = quantized(tensor, bits=2)  # levels -1, 0, 1
    # the mean of 40,000 draws of deviation at most 1/2 has a standard error of at most 0.0025
    torch.testing.assert_close(found.mean(0), tensor[0], rtol=0, atol=0.0125)
    assert sorted(found.unique().tolist()) == [-1.0, 0.0, 1.0]
    nearest = quantized(tensor, bits=2, rounding="deterministic")
    assert nearest[0].tolist() == [1.0, 0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3),
        torch.zeros(0, 2),
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0, -math.inf]),
        torch.tensor([1.4e-45, 0.0]),  # its spacing must not vanish
    ],
)
def test_empty_zero_non_finite_and_least_tensors_pass_unchanged(tensor: Tensor) -> None:
    assert same({"a": quantized(tensor, bits=16)}, {"a": tensor})


@settings(max_examples=40, deadline=None)
@given(
    ratio=st.sampled_from([0.001, 0.07, 0.1, 0.29, 0.5, 1.0]),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_nothing_is_lost_and_ceil_of_ratio_n_is_sent(
    ratio: float, sizes: list[int], seed: int
) -> None:
    rng = stream(seed)
    update = {str(i): torch.randn(size, generator=rng) for i, size in enumerate(sizes)}
    top = TopK(ratio=ratio)
    state = top.init(update, math.inf)
    for _ in range(3):
        sent, after = top.apply(update, state, rng)
        for name, tensor in update.items():
            assert torch.equal(sent[name] + after[name], tensor + state[name])
            assert not bool(((sent[name] != 0) & (after[name] != 0)).any())
        total = sum(sizes)
        values = torch.cat([*sent.values()])
        assert int((values != 0).sum()) == math.ceil(round(ratio * total, 9))
        if total and ratio < 1 and (values == 0).any():
            assert values[values != 0].abs().min() >= torch.cat([*after.values()]).abs().max()
        state = after


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    update = {"a": torch.tensor([1.0, -1.0, 1.0, -1.0])}
    top = TopK(ratio=0.5)
    sent, memory = top.apply(update, top.init(update, math.inf), stream())
    assert sent["a"].tolist() == [1.0, -1.0, 0.0, 0.0]
    assert memory["a"].tolist() == [0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_update_passes_and_leaves_the_memory_alone(value: float) -> None:
    top = TopK(ratio=0.1)
    _, memory = top.apply(mixed_update(), top.init(mixed_update(), math.inf), stream())
    bad = non_finite(value)
    sent, after = top.apply(bad, memory, stream())
    assert same(sent, bad)
    assert same(after, memory)


DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)


@pytest.mark.parametrize(
    ("defenses", "stated"),
    [
        ((GaussianNoise(std=0.3),), 0.3),
        ((Clip(norm=2.0), GaussianNoise(multiplier=1.1)), 2.2),
        ((Clip(norm=2.0), GaussianNoise(std=0.5)), 0.5),
        ((Clip(norm=2.0), Clip(norm=8.0), GaussianNoise(multiplier=0.5)), 1.0),
    ],
)
def test_the_measured_deviation_is_the_stated_one(defenses: tuple, stated: float) -> None:
    update = {"a": torch.zeros(100_000), "b": torch.zeros(100, 1000, dtype=torch.float64)}
    stack = chain(*defenses)
    defended, _ = stack.apply(update, stack.init(update, DECLARED), stream())
    for tensor in defended.values():
        # 100,000 draws: the standard error of the sample deviation is 0.22%
        assert float(tensor.double().std()) == pytest.approx(stated, rel=0.01)
        assert abs(float(tensor.double().mean())) < 0.02 * stated
    correlation = torch.corrcoef(torch.stack([t.double().flatten() for t in defended.values()]))
    assert abs(float(correlation[0, 1])) < 0.02


@pytest.mark.parametrize("parameters", [{}, {"std": 1.0, "multiplier": 1.0}])
def test_gaussian_noise_takes_exactly_one_scale(parameters: dict[str, float]) -> None:
    with pytest.raises(pydantic.ValidationError, match="exactly one"):
        GaussianNoise(**parameters)


@pytest.mark.parametrize(
    "defenses",
    [
        (GaussianNoise(multiplier=1.0),),
        (GaussianNoise(multiplier=1.0), Clip(norm=1.0)),
        (Clip(norm=1.0), Quantization(bits=8), GaussianNoise(multiplier=1.0)),
    ],
)
def test_a_multiplier_without_a_bound_is_refused_with_the_remedy(defenses: tuple) -> None:
    stack = chain(*defenses)
    with pytest.raises(FedsimError, match="put clip directly before it"):
        stack.guarantees(DECLARED)
    with pytest.raises(FedsimError, match="put clip directly before it"):
        stack.init({"a": torch.zeros(2)}, DECLARED)


TWO_IMAGES = LocalTraining(
    algorithm="fedsgd", steps=1, batch_size=2, lr=0.1, momentum=0.0, mode="train"
)


def test_dropout_reaches_the_gradient_of_a_real_model() -> None:
    """A neuron is dead for an image with probability about 1/2; dropping 90% leaves few alive."""
    model = MLP(head={"width": 64}).build((1, 4, 4), 3)  # type: ignore[arg-type]
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    images, labels = torch.randn(2, 1, 4, 4, generator=stream()), torch.tensor([0, 2])

    def dead(rate: float) -> int:
        loss = loss_function(model, {}, chain(Dropout(rate=rate)).training(TWO_IMAGES))
        with rng.global_stream(3):
            found = gradient(loss, parameters, images, labels)["head.output.weight"]
        return int((found == 0).all(0).sum())

    assert dead(0.9) > dead(0.0) + 10
