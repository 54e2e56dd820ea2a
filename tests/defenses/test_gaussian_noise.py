"""GaussianNoise: the noise that is stated, what it proves, and what it refuses."""

from __future__ import annotations

import math

import pydantic
import pytest
import torch

from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.contracts.stack import chain
from fedsim.testing.cases import stream
from fedsim.types import FedsimError, LocalTraining
from fedsim_defenses.clip import Clip
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.quantization import Quantization

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


def test_noise_is_added_to_the_update() -> None:
    noise = GaussianNoise(std=0.3)
    zero = torch.zeros(50)
    alone = noise.apply({"a": zero}, noise.init({"a": zero}, math.inf), stream())[0]["a"]
    shifted = noise.apply({"a": zero + 5}, noise.init({"a": zero}, math.inf), stream())[0]["a"]
    torch.testing.assert_close(shifted, alone + 5)


def test_rounds_draw_fresh_noise() -> None:
    update, rng = {"a": torch.zeros(20)}, stream()
    noise = GaussianNoise(std=1.0)
    state = noise.init(update, math.inf)
    first, state = noise.apply(update, state, rng)
    second, _ = noise.apply(update, state, rng)
    assert not torch.equal(first["a"], second["a"])


@pytest.mark.parametrize("parameters", [{}, {"std": 1.0, "multiplier": 1.0}])
def test_exactly_one_scale(parameters: dict[str, float]) -> None:
    with pytest.raises(pydantic.ValidationError, match="exactly one"):
        GaussianNoise(**parameters)


@pytest.mark.parametrize("parameters", [{"std": -1.0}, {"multiplier": math.inf}, {"std": math.nan}])
def test_scales_out_of_range_are_refused(parameters: dict[str, float]) -> None:
    with pytest.raises(pydantic.ValidationError):
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


def test_what_it_proves() -> None:
    bounded = Guarantee(sensitivity=4.0)
    assert GaussianNoise(std=6.0).guarantee(bounded).mechanism == Mechanism(
        noise_multiplier=1.5, unit="client", relation="zero_out"
    )
    assert GaussianNoise(multiplier=1.5).guarantee(bounded) == GaussianNoise(std=6.0).guarantee(
        bounded
    )
    unbounded = GaussianNoise(std=6.0).guarantee(Guarantee())
    assert unbounded.mechanism is None
    assert "put clip first" in unbounded.reason
    assert GaussianNoise(std=0.0).guarantee(bounded) == bounded
