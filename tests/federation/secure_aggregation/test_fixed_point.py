"""Numbers under masks: how exact a sum is, and that noise keeps to its bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim import rng
from fedsim.contracts.defense import SumTerms
from fedsim.federation.secure_aggregation.plan import Layout, _FixedPoint, _from_ring, _to_ring
from fedsim.federation.secure_aggregation.terms import AbortedError
from fedsim.types import FedsimError, Update


def _terms(**changes: float) -> SumTerms:
    given: dict[str, float] = {
        "threshold": 2 / 3,
        "colluding": 0.0,
        "range": 1.0,
        "buffer_range": 3.0,
        "most_examples": 8,
        "norm": math.inf,
        "noise": 0.0,
    }
    return SumTerms(**{**given, **changes})  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 1000), st.sampled_from([32, 64]), st.floats(1e-6, 1e6), st.integers(0, 2**32))
def test_a_number_is_exact_to_a_step_and_has_room_for_all_clients(
    clients: int, bits: int, range_: float, seed: int
) -> None:
    numbers = _FixedPoint(clients=clients, ring_bits=bits, range=range_)
    stream = np.random.default_rng(seed)
    values = np.concatenate([stream.uniform(-1.2, 1.2, 50), [1.0, -1.0]]) * range_
    found = numbers.encode(values, 1.0, rng.generator(seed, "rounding"))
    assert (
        np.abs(numbers.decode(found) - np.clip(values, -range_, range_)).max()
        <= 1.05 * numbers.step
    )
    total = found[-2:] * clients  # all clients at the end of the range
    assert np.array_equal(_from_ring(_to_ring(total, bits)), total)


@pytest.mark.parametrize(("clients", "error"), [(5, 1e-8), (100, 1e-7)])
def test_the_mean_is_exact_to_a_millionth_of_the_range(clients: int, error: float) -> None:
    """29 and 25 bits a client."""
    like = {"w": torch.zeros(40, 50)}
    layout = Layout(sums=(_terms(),), clients=clients, ring_bits=32, update=like, buffers={})
    updates = [
        Update(
            tensors={"w": rng.uniform((40, 50), rng.generator(1, "w", n)).float() * 2 - 1},
            num_examples=8,
        )
        for n in range(clients)
    ]
    total = np.zeros(layout.length, np.uint32)
    for n, update in enumerate(updates):
        total += layout.vector([update], lambda part, n=n: rng.generator(2, n, part))
    found = layout.sum_of(total, 0, clients)
    exact = torch.stack([update.tensors["w"].double() for update in updates]).mean(0)
    assert float((found.tensors["w"].double() - exact).abs().max()) < max(error, 2.0**-24)
    assert found.num_examples == 8 * clients


def test_weights_and_buffers_are_in_the_vector() -> None:
    like, buffers = {"w": torch.zeros(3)}, {"b": torch.zeros(2)}
    layout = Layout(
        sums=(_terms(), _terms()), clients=3, ring_bits=32, update=like, buffers=buffers
    )
    total = np.zeros(2 * layout.length, np.uint32)
    for n, count in enumerate((8, 4, 2)):
        update = Update(
            tensors={"w": torch.full((3,), 0.1 * n)},
            buffers={"b": torch.full((2,), 2.0 + n)},
            num_examples=count,
        )
        total += layout.vector([update, update], lambda part, n=n: rng.generator(3, n, part))
    for part in range(2):
        found = layout.sum_of(total, part, 3)
        assert found.num_examples == 14
        assert torch.allclose(found.tensors["w"], torch.full((3,), (0.4 + 0.4) / 14), atol=1e-6)
        # 4 is beyond the buffers' range of 3.
        assert torch.allclose(found.buffers["b"], torch.full((2,), (16 + 12 + 6) / 14), atol=1e-6)


def test_a_sum_that_counts_more_than_its_clients_can_is_refused() -> None:
    layout = Layout(
        sums=(_terms(),), clients=3, ring_bits=32, update={"w": torch.zeros(1)}, buffers={}
    )
    for count in (2, 25):
        with pytest.raises(AbortedError, match=f"says that it is of {count} examples"):
            layout.sum_of(_to_ring(np.array([0, count]), 32), 0, 3)


def test_rounding_is_right_on_average_and_never_the_same_way() -> None:
    numbers = _FixedPoint(clients=2, ring_bits=32, range=1.0)
    value = 0.3 * numbers.step
    found = numbers.encode(np.full(100_000, value), 1.0, rng.generator(5, "rounding"))
    assert set(found.tolist()) == {0, 1}
    assert found.mean() == pytest.approx(0.3, abs=0.0075)  # five standard deviations


@pytest.mark.parametrize("length", [1, 3, 1000, 20_000])
def test_no_rounded_vector_is_longer_than_what_noise_is_made_for(length: int) -> None:
    """Also one that has just that length, of which about every second rounding would be longer."""
    norm = 0.7
    numbers = _FixedPoint(clients=5, ring_bits=32, range=1.0, std=0.5, norm=norm)
    plain = _FixedPoint(
        clients=5, ring_bits=32, range=1.0 + 12 * 0.5, std=0.0, norm=norm
    )  # of the same step, without noise
    assert plain.step == pytest.approx(numbers.step, rel=1e-12)
    for seed in range(8):
        values = np.random.default_rng(seed).normal(size=length)
        values *= norm / np.linalg.norm(values) * (1 + 1e-6)
        found = plain.encode(values, 1.0, rng.generator(seed, "rounding"))
        assert np.linalg.norm(found.astype(np.float64)) * plain.step <= norm * (1 + 1e-12)
        assert np.abs(found * plain.step - values).max() <= 2e-6


def test_noise_has_the_deviation_that_it_says() -> None:
    numbers = _FixedPoint(clients=5, ring_bits=32, range=1.0, std=0.25, norm=1.0)
    found = numbers.encode(np.zeros(200_000), 1.0, rng.generator(6, "noise"))
    assert numbers.decode(found).std() == pytest.approx(0.25, rel=0.008)
    again = numbers.encode(np.zeros(200_000), 1.0, rng.generator(7, "noise"))
    assert abs(np.corrcoef(found, again)[0, 1]) < 0.012


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_cannot_be_added(value: float) -> None:
    numbers = _FixedPoint(clients=5, ring_bits=32, range=1.0)
    with pytest.raises(FedsimError, match="NaN or infinity"):
        numbers.encode(np.array([0.0, value]), 1.0, rng.generator(1, "rounding"))


@pytest.mark.parametrize("answering", [4, 5])
def test_noise_of_any_sum_that_opens_is_no_less_than_claimed(answering: int) -> None:
    """Of five clients with threshold 0.75 and a fifth that colludes, 4 are in a sum, 3 honest."""
    terms = _terms(threshold=0.75, colluding=0.2, noise=2.0)
    honest = answering - 1
    assert terms.client_noise(5) * math.sqrt(honest) >= 2.0 * (1 - 1e-12)
