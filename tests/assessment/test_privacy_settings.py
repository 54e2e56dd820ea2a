"""Privacy settings of a tapped app: found on its live objects, and claimed by the ledger."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod.localdp_mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from torch import Tensor

import fedsim
from fedsim.assessment.clients import Picked
from fedsim.assessment.privacy_settings import PrivacySettings, _read_server_noise, read_privacy
from fedsim.federation.local import LocalGrid, identity
from fedsim.federation.tapping import _list_strategies
from fedsim.privacy.numerics import gaussian
from fedsim.recording.exchanges import (
    DeployedPart,
    Exchange,
    Recorder,
    describe_part,
    digest_of,
    left_out,
    read_exchanges,
    read_parts,
    run_folder,
)
from fedsim.testing.cases import example_training
from fedsim.types import FedsimError, Tensors

LOCAL_DP = LocalDpMod(1.0, 1.0, 8.0, 1e-5)
OLDER_LOCAL_DP = OlderLocalDpMod(1.0, 1.0, 8.0, 1e-5)
"""The mod of apps that have a NumPyClient."""


def own_mod(message: Message, context: Context, call_next: Any) -> Message:
    return call_next(message, context)  # type: ignore[no-any-return]


def move(message: Message, context: Context) -> Message:
    sent = message.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
    moved = {name: value + 1 for name, value in sent.items()}
    metrics = MetricRecord({"num-examples": 5})
    content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
    return Message(content, reply_to=message)


def order() -> RecordDict:
    config = ConfigRecord({"server-round": 1, "clipping_norm": 0.5})
    return RecordDict({"arrays": ArrayRecord({"w": torch.zeros(4)}), "config": config})


def names(parts: list[DeployedPart] | None) -> list[str]:
    assert parts is not None
    return [part.name.rpartition(".")[2] for part in parts]


def test_mods_are_found_whereever_the_tap_stands(tmp_path: Path) -> None:
    app = ClientApp(mods=[own_mod, fedsim.client_tap(tmp_path), message_size_mod])
    app.train(mods=[LOCAL_DP, fixedclipping_mod])(move)
    with identity():
        grid = LocalGrid(app, 1, 60)
        list(grid.send_and_receive([Message(order(), next(iter(grid.get_node_ids())), "train")]))
    found = read_parts(run_folder(tmp_path), "mods")
    assert names(found) == ["own_mod", "message_size_mod", "LocalDpMod", "fixedclipping_mod"]
    assert found and found[2].settings == {
        "clipping_norm": 1.0,
        "sensitivity": 1.0,
        "epsilon": 8.0,
        "delta": 1e-5,
    }


@pytest.mark.parametrize("tapped", ["grid", "strategy"])
def test_wrappers_and_their_accountant_are_found(tapped: str, tmp_path: Path) -> None:
    config = PrivacyConfig(
        target_delta=1e-6,
        population_size=2,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
        max_epsilon=30.0,
    )
    accountant = RdpAccountant(config)
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 2.0, 1.0, 2, accountant=accountant
    )
    app = ClientApp()
    app.train()(move)
    with identity():
        grid: Any = LocalGrid(app, 2, 60)
        if tapped == "grid":
            grid = fedsim.tap(grid, out=tmp_path)
        else:
            fedsim.tap(strategy, out=tmp_path)
        strategy.start(grid, order()["arrays"], num_rounds=2)  # type: ignore[arg-type]
    found = read_parts(run_folder(tmp_path), "strategies")
    assert names(found) == ["DifferentialPrivacyServerSideFixedClipping", "FedAvg"]
    assert found and found[0].number("noise_multiplier") == 2.0
    assert found[0].number("accountant_max_epsilon") == 30.0
    # The grid is called before a round is counted, the strategy returns after.
    assert found[0].number("accountant_releases") == (1 if tapped == "grid" else 2)
    noise = _read_server_noise(found, read_exchanges(run_folder(tmp_path)), mods=None, delta=1e-5)
    assert noise and noise.claimed_epsilon == 30.0
    # Two rounds of equal weights, at the accountant's own δ, whose RDP is never below.
    assert noise.epsilon == pytest.approx(float(gaussian.epsilon(2 / math.sqrt(2), 1e-6)))
    assert noise.epsilon <= accountant.get_privacy_spent().epsilon


def exchanges(
    folder: Path,
    weights: list[list[float]],
    reply: Tensors | None = None,
    config: dict[str, Any] | None = None,
) -> list[Exchange]:
    """Records a round for each list, in which node k answers and states the k-th number."""
    tensors = {"w": torch.zeros(4)} if reply is None else reply
    content = {name: value.numpy() for name, value in tensors.items()}
    recorder = Recorder(folder, 1, "server", rounds=None, clients=None, max_bytes=1 << 20)
    for round, own in enumerate(weights, 1):
        digest = recorder.save_broadcast(round, content)
        assert digest
        for node, weight in enumerate(own):
            recorder.save_reply(
                content,
                round=round,
                node_id=node,
                message_id=f"{round}-{node}",
                broadcast=digest,
                config={"c": config or {}},
                metrics={"m": {"num-examples": weight}},
            )
    return read_exchanges(run_folder(folder))


def noise_of(
    strategy: Any, folder: Path, weights: list[list[float]], mods: Any = None, **more: Tensor
) -> Any:
    found = exchanges(folder, weights, {"w": torch.zeros(4), **more})
    return _read_server_noise(_list_strategies(strategy), found, mods=mods, delta=1e-5)


def test_a_heavier_client_has_less_protection(tmp_path: Path) -> None:
    strategy = SERVER(FedAvg(), 4.0, 1.0, 2)
    noise = noise_of(strategy, tmp_path, [[1, 3], [3, 1], [1, 3]])
    # Node 1 has 3/4 of the mean twice and 1/4 once: n times its weights are 1.5, 0.5 and 1.5.
    multiplier = 4 / math.sqrt(1.5**2 + 0.5**2 + 1.5**2)
    assert noise.epsilon == pytest.approx(float(gaussian.epsilon(multiplier, 1e-5)))
    assert noise.claimed_epsilon is None


def test_an_adaptive_norm_releases_a_count_as_well(tmp_path: Path) -> None:
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), 1.0, 2, clipped_count_stddev=3.0
    )
    noise = noise_of(strategy, tmp_path, [[1, 1]])
    # The noise follows the next norm, which all clients and noise of half of δ would lower so far.
    lag = math.exp(0.2 * (1 + 3 * -NormalDist().inv_cdf(5e-6) / 2 - 0.5))
    # Flower's own multiplier is z with 1/z² = 1/1² - 1/6²; the count moves by 1, against σ = 3.
    multiplier = 1 / math.sqrt((1 - 1 / 36) * lag**2 + 1 / 9)
    assert noise.epsilon == pytest.approx(float(gaussian.epsilon(multiplier, 5e-6)))


def test_adaptive_noise_follows_the_next_norm() -> None:
    """As of Flower 1.41: the norm falls before the noise is drawn, and has clipped before."""
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), 1.0, 2, initial_clipping_norm=1.0, clip_norm_lr=4.0, clipped_count_stddev=0.51
    )
    strategy._noisy_fraction = lambda count, total: count / total  # type: ignore[method-assign]
    held: list[float] = []

    def note_norm(arrays: ArrayRecord) -> ArrayRecord:
        held.append(strategy.clipping_norm)
        return arrays

    strategy._add_noise_to_aggregated_arrays = note_norm  # type: ignore[method-assign]
    strategy.current_arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    long = ArrayRecord({"w": Array(np.full(4, 9, np.float32))})
    sent = {"arrays": long, "metrics": MetricRecord({"num-examples": 1})}
    with identity():
        order = Message(RecordDict(), dst_node_id=1, message_type="train")
        strategy.aggregate_train(1, [Message(RecordDict(sent), reply_to=order) for _ in range(2)])
    assert held == [pytest.approx(math.exp(-4 * 0.5))]


class Doubling(FedAvg):
    """Moves the model by more than the mean of the updates."""


SERVER, CLIENT = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
BEHIND = [describe_part(own_mod), describe_part(fixedclipping_mod)]


@pytest.mark.parametrize(
    ("strategy", "weights", "mods", "more", "reason"),
    [
        (SERVER(Doubling(), 1, 1, 1), [[1]], None, {}, "inside"),
        (SERVER(FedAvg(), 0, 1, 1), [[1]], None, {}, "no noise"),
        (SERVER(FedAvg(), 10**400, 1, 1), [[1]], None, {}, "no noise"),
        (SERVER(FedAvg(), 1, 1, 2), [[1]], None, {}, "recorded"),
        (SERVER(FedAvg(), 1, 1, 1), [[0]], None, {}, "weighted"),
        (CLIENT(FedAvg(), 1, 1, 1), [[1]], None, {}, "not known"),
        (CLIENT(FedAvg(), 1, 1, 1), [[1]], [], {}, "do not clip"),
        (CLIENT(FedAvg(), 1, 1, 1), [[1]], BEHIND, {}, "do not clip"),
        (SERVER(FedAvg(), 1, 1, 1), [[1]], None, {"n": torch.zeros(())}, "single number"),
        (SERVER(FedAvg(), 1, 1, 1), [[1]], None, {"n": torch.tensor([0])}, "floating-point"),
    ],
)
def test_the_servers_noise_is_not_accounted_unless_it_is_proven(
    strategy: Any,
    weights: list[list[float]],
    mods: Any,
    more: dict[str, Tensor],
    reason: str,
    tmp_path: Path,
) -> None:
    noise = noise_of(strategy, tmp_path, weights, mods, **more)
    assert noise.epsilon == math.inf
    assert reason in noise.text


def test_the_norm_of_a_clipping_mod_is_what_the_server_sends_and_no_metric(tmp_path: Path) -> None:
    (found,) = exchanges(tmp_path, [[1]], None, {"clipping_norm": 0.5})
    stating = found.model_copy(update={"metrics": {"m": {"clipping_norm": 0.01}}})
    parts = [describe_part(LOCAL_DP), describe_part(fixedclipping_mod)]
    settings = read_privacy([stating], {stating.message_id: parts}, None)
    assert settings.defenses is not None
    # The mod that is named last changes the answer first.
    assert [ref.name for ref in settings.defenses.refs] == ["clip", "local_dp_mod"]
    assert settings.defenses.refs[0].parameters == {"norm": 0.5}


def settings_of(
    mods: list[Any], folder: Path, rounds: int = 1, reply: Tensors | None = None
) -> tuple[PrivacySettings, Picked]:
    found = exchanges(folder, [[1]] * rounds, reply, {"clipping_norm": 0.5})
    parts = [describe_part(mod) for mod in mods]
    settings = read_privacy(found, {each.message_id: parts for each in found}, None)
    picked: Any = Picked(found[-1], None, 0)  # type: ignore[arg-type]
    return settings, picked


@pytest.mark.parametrize("rounds", [1, 20])
@pytest.mark.parametrize("mod", [LOCAL_DP, OLDER_LOCAL_DP])
def test_local_dp_is_claimed_beside_what_holds(mod: Any, rounds: int, tmp_path: Path) -> None:
    # What acts before the clip changes no bound.
    settings, picked = settings_of([message_size_mod, mod, own_mod], tmp_path, rounds)
    privacy, lines = settings.describe_privacy(picked, example_training())
    # σ = √(2 ln(1.25 / δ)) / 8 over a clip of 1, in each round.
    multiplier = math.sqrt(2 * math.log(1.25e5)) / 8 / math.sqrt(rounds)
    assert privacy["epsilon"] == pytest.approx(float(gaussian.epsilon(multiplier, 1e-5)))
    assert privacy["claimed_epsilon"] == 8
    assert (privacy["unit"], privacy["relation"]) == ("client", "zero_out")
    against_any = float(gaussian.epsilon(multiplier / 2, 1e-5))
    assert any(f"{against_any:.3g}" in line for line in lines)
    assert any(f"after {rounds} round" in line for line in lines)


@pytest.mark.parametrize(
    ("mods", "reply", "reason"),
    [
        ([own_mod, LOCAL_DP], None, "own_mod"),
        ([own_mod], None, "own_mod"),
        ([LOCAL_DP], {"w": torch.zeros(4), "s": torch.zeros(())}, "single number"),
        ([LOCAL_DP], {"w": torch.zeros(4), "n": torch.zeros(4, dtype=torch.int64)}, "n"),
        ([LocalDpMod(1.0, 0.0, 8.0, 1e-5)], None, "LocalDpMod"),
        ([fixedclipping_mod], None, "no noise"),
    ],
)
def test_nothing_is_claimed_of_what_is_not_proven(
    mods: list[Any], reply: Tensors | None, reason: str, tmp_path: Path
) -> None:
    settings, picked = settings_of(mods, tmp_path, reply=reply)
    privacy, _ = settings.describe_privacy(picked, example_training())
    assert privacy["epsilon"] == "inf"
    assert reason in privacy["reason"]


def test_of_norms_that_change_the_largest_is_claimed(tmp_path: Path) -> None:
    rounds = [
        each.model_copy(update={"config": {"c": {"clipping_norm": norm}}})
        for each, norm in zip(exchanges(tmp_path, [[1], [1]]), (0.5, 0.01), strict=True)
    ]
    parts = [describe_part(LOCAL_DP), describe_part(fixedclipping_mod)]
    settings = read_privacy(rounds, {each.message_id: parts for each in rounds}, None)
    picked = Picked(rounds[-1], None, 0)  # type: ignore[arg-type]
    privacy, _ = settings.describe_privacy(picked, example_training())
    multiplier = math.sqrt(2 * math.log(1.25e5)) / 8 / 0.5 / math.sqrt(2)
    assert privacy["epsilon"] == pytest.approx(float(gaussian.epsilon(multiplier, 1e-5)))


@pytest.mark.parametrize(
    ("mods", "missing", "reason"),
    [
        ({"1-0": [describe_part(LOCAL_DP)]}, [], "not witnessed"),
        ({"1-0": [describe_part(LOCAL_DP)], "2-0": []}, [], "differ"),
        (None, ["answered twice in a round: 3 messages"], "answered twice"),
        (None, ["sent with other mods than before: 1 message"], "other mods"),
        (None, ["no room below max_gib: 1 message"], "no room"),
        (None, ["a client answered with an error: 1 message"], ""),
    ],
)
def test_releases_that_differ_or_that_nobody_counted_are_not_claimed(
    mods: Any, missing: list[str], reason: str, tmp_path: Path
) -> None:
    found = exchanges(tmp_path, [[1], [1]])
    mods = mods or {each.message_id: [describe_part(LOCAL_DP)] for each in found}
    settings = read_privacy(found, mods, None, missing)
    assert settings.defenses is not None
    assert reason in settings.defenses.unproven
    assert bool(settings.defenses.unproven) == bool(reason)


def test_mods_that_change_are_counted(tmp_path: Path) -> None:
    (exchange,) = exchanges(tmp_path, [[1]])
    folder = exchange.path.parents[1]
    recorder = Recorder(tmp_path, 1, "client", rounds=None, clients=None, max_bytes=1 << 20)
    for mods in ([describe_part(LOCAL_DP)], [describe_part(LOCAL_DP)], []):
        assert left_out(folder) == []
        recorder.note_parts("mods", mods)
    assert left_out(folder) == ["sent with other mods than before: 1 message"]


def test_settings_that_a_defense_does_not_know_make_a_part_unknown(tmp_path: Path) -> None:
    part = describe_part(LOCAL_DP, {"warm_up": 3})
    found = exchanges(tmp_path, [[1]])
    settings = read_privacy(found, {"1-0": [part]}, None)
    assert settings.defenses is not None
    assert settings.defenses.refs == ()


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    found = exchanges(tmp_path, [[1]])
    path = found[0].path.parents[1] / "tap.json"
    path.write_text('{"mods": [{"name": 1}]}')
    with pytest.raises(FedsimError, match="not what a tap writes"):
        read_parts(path.parent, "mods")


@pytest.mark.parametrize("field", ["config", "metrics"])
def test_recordings_that_state_other_numbers_are_different_ones(field: str, tmp_path: Path) -> None:
    found = exchanges(tmp_path, [[1, 2]])
    changed = [each.model_copy(update={field: {"m": {"num-examples": 3}}}) for each in found]
    assert digest_of(found) == digest_of(found[::-1]) != digest_of(changed)
