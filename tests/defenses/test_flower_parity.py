"""Flower's own mods and wrappers beside the defenses that stand for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod as FlowerLocalDpMod
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from fedsim.contracts.defense import global_norm
from fedsim.federation.local import LocalGrid, identity
from fedsim.testing.cases import stream
from fedsim.types import Tensors
from fedsim_defenses.clip import Clip
from fedsim_defenses.local_dp_mod import LocalDpMod

BEFORE = {"a": torch.linspace(-1, 1, 300), "b": torch.ones(20, 10)}
UPDATE = {"a": torch.randn(300, generator=stream(1)), "b": torch.randn(20, 10, generator=stream(2))}


def add(first: Tensors, second: Tensors, factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: value + factor * second[name] for name, value in first.items()}


def answer(weights: Tensors, examples: int = 1) -> RecordDict:
    return RecordDict(
        {"arrays": ArrayRecord(dict(weights)), "metrics": MetricRecord({"num-examples": examples})}
    )


def through(mods: list[Any], norm: float, update: Tensors = UPDATE) -> tuple[Tensors, Any]:
    """The update that a client with these mods lets out, and the metrics beside it."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(answer(add(BEFORE, update)), reply_to=message)

    config = ConfigRecord({"clipping_norm": norm})
    content = RecordDict({"arrays": ArrayRecord(dict(BEFORE)), "config": config})
    with identity():
        grid = LocalGrid(app, 1, 60)
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(content, node, "train")])
    sent: Any = reply.content["arrays"]
    return add(sent.to_torch_state_dict(), BEFORE, -1), reply.content["metrics"]


def assert_same(found: Tensors, expected: Tensors) -> None:
    for name, value in expected.items():
        # The mods clip weights less weights, which rounds each entry to its weight's precision.
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", [1.0, 1e3])
@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_clipping_mods_clip_as_clip_does(mod: Any, norm: float) -> None:
    found, metrics = through([mod], norm)
    assert_same(found, Clip(norm=norm).apply(UPDATE, {}, stream(3))[0])
    if mod is adaptiveclipping_mod:
        assert bool(metrics["norm_bit"]) == (float(global_norm(UPDATE)) > norm)


def test_flowers_clip_passes_what_is_beside_a_nan() -> None:
    """So that nothing bounds such an update; `Clip` sends zeros in its place."""
    broken = {**UPDATE, "b": torch.full((20, 10), torch.nan)}
    found, _ = through([fixedclipping_mod], 1e-3, broken)
    assert_same({"a": found["a"]}, {"a": UPDATE["a"]})
    clipped, _ = Clip(norm=1e-3).apply(broken, {}, stream(3))
    assert not any(bool(value.any()) for value in clipped.values())


def test_local_dp_clips_and_adds_the_noise_of_its_formula() -> None:
    found, _ = through([FlowerLocalDpMod(0.5, 0.0, 8.0, 1e-5)], 1.0)
    assert_same(found, Clip(norm=0.5).apply(UPDATE, {}, stream(3))[0])
    ours = LocalDpMod(clipping_norm=0.5, sensitivity=2.0, epsilon=8.0, delta=1e-5)
    wide = {"a": torch.zeros(300), "b": torch.zeros(20, 10)}
    noise, _ = through([FlowerLocalDpMod(0.5, 2.0, 8.0, 1e-5)], 1.0, add(wide, UPDATE, 1e-9))
    drawn = torch.cat([value.flatten() for value in noise.values()])
    # 500 draws: five deviations of such an estimate are 16%.
    assert float(drawn.std()) == pytest.approx(ours.std, rel=0.17)


def test_mods_act_from_the_last_to_the_first() -> None:
    """So that noise behind a clip is noise in front of it where the order is turned."""
    noised = FlowerLocalDpMod(100.0, 100.0, 1.0, 1e-5)
    clipped_last, _ = through([fixedclipping_mod, noised], 1.0)
    noised_last, _ = through([noised, fixedclipping_mod], 1.0)
    assert float(global_norm(clipped_last)) <= 1.0 + 1e-4
    assert float(global_norm(noised_last)) > 100


def aggregated(strategy: Any, updates: Sequence[Tensors]) -> Tensors:
    """The server's mean of updates, after one round of a wrapped strategy."""
    strategy.current_arrays = ArrayRecord(dict(BEFORE))
    order = Message(answer(BEFORE), 1, "train")
    replies = [Message(answer(add(BEFORE, each)), reply_to=order) for each in updates]
    arrays, _ = strategy.aggregate_train(1, replies)
    return add(arrays.to_torch_state_dict(), BEFORE, -1)


def test_the_servers_clipping_is_clip_before_a_mean() -> None:
    updates = [UPDATE, add(UPDATE, UPDATE, -1.5)]
    clipped = [Clip(norm=0.3).apply(each, {}, stream(1))[0] for each in updates]
    expected = {name: (clipped[0][name] + clipped[1][name]) / 2 for name in UPDATE}
    with identity():
        fixed = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 0.3, 2)
        assert_same(aggregated(fixed, updates), expected)
        adaptive = DifferentialPrivacyServerSideAdaptiveClipping(
            FedAvg(), 0.0, 2, initial_clipping_norm=0.3
        )
        assert_same(aggregated(adaptive, updates), expected)
    # Both were clipped, of which half is the target: the norm moves by its learning rate of 0.2.
    assert adaptive.clipping_norm == pytest.approx(0.3 * math.exp(-0.2 * (1 - 0.5)))


def test_the_servers_noise_is_that_of_one_clients_weight() -> None:
    """σ = z C / n, as `assess` takes it: the multiplier is z where all weights are 1 / n."""
    still = {name: 1e-9 * value for name, value in UPDATE.items()}
    with identity():
        noise = aggregated(
            DifferentialPrivacyServerSideFixedClipping(FedAvg(), 3.0, 0.4, 2), [still, still]
        )
    drawn = torch.cat([value.flatten() for value in noise.values()])
    assert float(drawn.std()) == pytest.approx(3.0 * 0.4 / 2, rel=0.17)
