"""The spool, the strategies by name, and their memory, each on its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_support import CLIP, STRATEGIES, plugin, scenario, with_strategy
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent

from fedsim.federation import strategies, wire
from fedsim.federation.local import identity
from fedsim.federation.refusals import check_scenario
from fedsim.federation.screening import is_zero, judge
from fedsim.federation.spool import Spool, lazy_record
from fedsim.federation.wire import WireAnswer
from fedsim.types import FedsimError, Update

SERVER_SIDE = "DifferentialPrivacyServerSideFixedClipping"


def _answer(seed: int, examples: int, loss: float | None = 1.0) -> WireAnswer:
    stream = torch.Generator().manual_seed(seed)
    return WireAnswer(
        update=Update(
            tensors={"w": torch.randn(10, generator=stream)},
            num_examples=examples,
            buffers={"m": torch.randn(2, generator=stream)},
        ),
        loss=loss,
    )


@pytest.mark.parametrize("budget", [0, 100, 10**6])
def test_the_spool_gives_back_what_it_was_given(budget: int, tmp_path: Path) -> None:
    answers = {client: _answer(client, client + 1) for client in (5, 1, 3)}
    folder = tmp_path / "spool"
    with Spool(folder, budget) as spool:
        for client, answer in answers.items():
            spool.put(client, answer)
        on_disk = len(list(folder.glob("*")))
        assert on_disk == {0: 3, 100: 1, 10**6: 0}[budget]  # 48 bytes each
        assert spool.clients() == [1, 3, 5]
        updates = [spool.get(client, ["w"], ["m"]) for client in spool.clients()]
        for client, update in zip([1, 3, 5], updates, strict=True):
            assert torch.equal(update.tensors["w"], answers[client].update.tensors["w"])
            assert torch.equal(spool.update(client, "w"), update.tensors["w"])
            assert update.num_examples == client + 1
        expected = sum(answers[c].update.buffers["m"] * ((c + 1) / 12) for c in (1, 3, 5))
        assert torch.allclose(spool.mean_buffers(["m"])["m"], torch.as_tensor(expected))
    assert not folder.exists() and spool.clients() == []


def test_the_mean_loss_weighs_by_examples(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        assert spool.mean_loss() is None
        spool.put(0, _answer(0, 1, 4.0))
        spool.put(1, _answer(1, 3, 8.0))
        assert spool.mean_loss() == 7.0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([3e38, 3e38], None),  # their sum is infinite, they are not
        ([0.0, 0.0], None),
        ([math.inf, -math.inf], "non_finite"),
        ([math.nan, 0.0], "non_finite"),
    ],
)
def test_screening_looks_at_every_entry(values: list[float], reason: str | None) -> None:
    update = Update(tensors={"w": torch.tensor(values)}, num_examples=1)
    with identity():
        reply = Message(wire.answer(update, None), 2, "train")
    verdict = judge(reply, wire.Shape(update=update.tensors, buffers={}, loss=False))
    assert verdict.reason == reason and verdict.answer is not None
    assert is_zero(update.tensors) == (values == [0.0, 0.0])
    late = {"w": torch.zeros(10), "x": torch.zeros(1000).index_fill(0, torch.tensor(999), 1e-30)}
    assert not is_zero(late) and is_zero({**late, "x": torch.zeros(0)})


def test_a_lazy_array_is_an_array_whose_reader_may_write() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    record = lazy_record({"w": value}, lambda name: value + 1)
    array = record["w"]
    assert (array.dtype, array.shape, array.stype) == ("float32", (2, 3), "numpy.ndarray")
    array.numpy()[:] = 0
    assert np.array_equal(array.numpy(), (value + 1).numpy())
    assert array.data == Array((value + 1).numpy()).data


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("FedAdm", {}, "did you mean 'FedAdam'"),
        ("Strategy", {}, "no strategy 'Strategy'"),
        ("FedAdam", {"etta": 1.0}, "no parameter 'etta'; did you mean 'eta'"),
        ("FedAdam", {"eta": "fast"}, "eta of FedAdam is 'fast'"),
        ("FedAdam", {"eta": float("nan")}, "eta of FedAdam is nan"),
        ("FedTrimmedAvg", {"beta": 0.7}, r"FedTrimmedAvg: `beta` must be"),
        ("QFedAvg", {}, "QFedAvg needs 'client_learning_rate'"),
        ("FedAvg", {"fraction_train": 0.5}, "is federation.participation"),
        ("FedAvg", {"train_metrics_aggr_fn": "x"}, "set by fedsim"),
        ("FedProx", {}, "proximal"),
        ("FedXgbBagging", {}, "trees"),
        ("DifferentialPrivacyClientSideAdaptiveClipping", {}, "needs"),
        (SERVER_SIDE, {"strategy": 3}, "strategy is 3"),
        (SERVER_SIDE, {"strategy": "FedAv"}, "'FedAvg'"),
        (SERVER_SIDE, {"strategy": {"name": SERVER_SIDE}}, "itself a wrapper"),
    ],
)
def test_a_wrong_strategy_is_refused_before_training(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedsimError, match=message):
        check_scenario(with_strategy(name, parameters))


SECURE = [{"name": "aggregate"}]
PRIVATE = [CLIP, plugin("gaussian_noise", multiplier=1.0)]
WRAPPED = {
    "strategy": "FedAvg",
    "noise_multiplier": 1.0,
    "clipping_norm": 1.0,
    "num_sampled_clients": 4,
}


@pytest.mark.parametrize(
    ("name", "parameters", "stack"),
    [
        *((name, {}, SECURE) for name in ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum")),
        ("Bulyan", {}, SECURE),
        ("QFedAvg", {"client_learning_rate": 0.1}, SECURE),
        ("QFedAvg", {"client_learning_rate": 0.1}, PRIVATE),
        (SERVER_SIDE, WRAPPED, SECURE),
    ],
)
def test_a_strategy_that_needs_what_the_stack_hides_is_refused(
    name: str, parameters: dict[str, Any], stack: list[dict[str, Any]]
) -> None:
    with pytest.raises(FedsimError, match=f"defenses.hidden: .*{name} needs each client's"):
        check_scenario(with_strategy(name, parameters, defenses={"none": [], "hidden": stack}))
    check_scenario(with_strategy(name, parameters))


@pytest.mark.parametrize(
    ("stack", "rate", "fits"),
    [
        ([0.5], 0.1, True),
        ([1.0], 0.1, True),
        ([2.0], 0.1, False),
        ([], 0.1, False),
        # A gradient of length 1 moves weights by the learning rate.
        ([1.0], 5.0, False),
        ([0.2], 5.0, True),
    ],
)
def test_noise_for_clipped_updates_demands_clients_that_clip(
    stack: list[float], rate: float, fits: bool
) -> None:
    clips = [plugin("clip", norm=norm) for norm in stack]
    wanted = with_strategy(
        "DifferentialPrivacyClientSideFixedClipping",
        WRAPPED,
        defenses={"own": clips},
        training__algorithm="fedsgd",
        training__local={"steps": 1, "batch_size": 4, "lr": rate},
    )
    if fits:
        check_scenario(wanted)
    else:
        with pytest.raises(FedsimError, match=rf"defenses.own: .* norm: {1 / max(1, rate):g}$"):
            check_scenario(wanted)


@pytest.mark.parametrize(
    ("accountant", "message"),
    [
        ({"max_epsilon": -1.0, "delta": 1e-5}, "max_epsilon: .* greater than 0"),
        ({"max_epsilon": 8.0}, "delta: .* required"),
        ({"max_epsilon": 8.0, "delta": 1e-5, "by": 1}, "by: "),
        ({"max_epsilon": 8.0, "delta": 1e-5}, "after round 2, and round 3 is to be attacked"),
        ({"max_epsilon": 0.1, "delta": 1e-5}, "after round 0"),
    ],
)
def test_an_accountant_is_checked_before_training(
    accountant: dict[str, float], message: str
) -> None:
    parameters, attacks = {**WRAPPED, "accountant": accountant}, [{"name": "label_inference"}]
    with pytest.raises(FedsimError, match=message):
        check_scenario(with_strategy(SERVER_SIDE, parameters, attacks=attacks))


def test_clients_that_clip_changes_of_weights_send_no_gradients() -> None:
    name = "DifferentialPrivacyClientSideAdaptiveClipping"
    check_scenario(with_strategy(name, STRATEGIES[name], training__algorithm="fedavg"))
    with pytest.raises(FedsimError, match="set it to fedavg"):
        check_scenario(with_strategy(name, STRATEGIES[name], training__algorithm="fedsgd"))


def test_a_strategy_of_the_mean_works_on_a_combination() -> None:
    for name in ("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"):
        check_scenario(scenario(federation={"strategy": name}, defenses={"secure": SECURE}))


def test_a_strategys_memory_is_restored_exactly() -> None:
    strategy = FedAvg()
    remembered: dict[str, Any] = {
        "nothing": None,
        "yes": True,
        "count": 3,
        "rate": 0.1 + 0.2,
        "infinite": float("-inf"),
        "text": "a",
        "moments": {"w": np.arange(3, dtype=np.float32), "b": np.float64(0.1)},
        "vector": [np.zeros((2, 2)), np.array(5)],
        "pair": (1, 2.5),
        "by_node": {7: 1, 9: 2},
        "record": ArrayRecord({"w": Array(np.eye(2))}),
        "strategy": FedAvg(fraction_train=0.25),
    }
    vars(strategy).update(remembered)
    plain, tensors = strategies.save_memory(strategy)
    fresh = FedAvg()
    fresh.strategy = FedAvg()  # type: ignore[attr-defined]
    strategies.restore_memory(fresh, plain, tensors)
    after: dict[str, Any] = vars(fresh)
    assert after["strategy"].fraction_train == 0.25
    assert after["record"] == remembered["record"]
    assert after["moments"]["b"] == 0.1 and type(after["moments"]["b"]) is np.float64
    assert after["moments"]["w"].dtype == np.float32
    assert np.array_equal(after["moments"]["w"], [0, 1, 2])
    after["moments"]["w"][0] = 9  # writable
    assert [a.shape for a in after["vector"]] == [(2, 2), ()]
    for name in ("nothing", "yes", "count", "rate", "infinite", "text", "pair", "by_node"):
        assert after[name] == remembered[name] and type(after[name]) is type(remembered[name])


def test_an_accountant_remembers_what_was_spent() -> None:
    parameters = {**WRAPPED, "accountant": {"max_epsilon": 8.0, "delta": 1e-5}}
    strategy, fresh = (strategies.build(SERVER_SIDE, parameters) for _ in range(2))
    # Exact ε of 2 and 3 rounds of multiplier 1 are 6.6 and 8.4.
    assert [strategies.rounds_within_budget(strategy, most) for most in (1, 9)] == [1, 2]
    strategy.accountant.compose(GaussianPrivacyEvent(1.0, 4, 4), 2)  # type: ignore[attr-defined]
    strategies.restore_memory(fresh, *strategies.save_memory(strategy))
    assert fresh.accountant.get_privacy_spent() == strategy.accountant.get_privacy_spent()  # type: ignore[attr-defined]
    assert strategies.rounds_within_budget(fresh, 9) == 0


def test_a_memory_that_cannot_be_saved_is_refused() -> None:
    strategy = FedAvg()
    vars(strategy)["model"] = {"inner": object()}
    with pytest.raises(FedsimError, match=r"FedAvg\.model\.inner is a object, which cannot"):
        strategies.save_memory(strategy)
