"""The tap of an NVFlare job; skipped where NVFlare is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.recording.exchanges import read_exchanges, read_parts, run_folder
from fedsim.recording.witnessed import read_witnessed

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from fedsim.assessment.privacy_settings import read_privacy
from fedsim.nvflare_tap import ClientTap, ServerTap, node_id

TASK = "the-task"


class Runner:
    """Has the filters of a client's results, as NVFlare's runner has."""

    def __init__(self, *filters: Any) -> None:
        self.task_result_filters = {"train" + "/" + "out": list(filters)}


def context(identity: str, runner: Any = None, peer: str | None = None) -> FLContext:
    """The context of one task, as NVFlare hands it to components."""
    manager = FLContextManager(engine=None, identity_name=identity, job_id="job")
    found = manager.new_context()
    found.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
    found.set_prop(FLContextKey.TASK_ID, TASK, private=True, sticky=False)
    found.set_prop(ReservedKey.RUNNER, runner, private=True, sticky=False)
    if peer is not None:
        found.set_peer_context(context(peer))
    return found


def order(weights: dict[str, Any]) -> Any:
    shareable = DXO(DataKind.WEIGHTS, weights).to_shareable()
    shareable.set_header("current_round", 2)
    return shareable


def trained(net: nn.Module) -> dict[str, Any]:
    """The weight difference of one step on three images."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images, labels = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 0])
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    return {name: (value - before[name]).numpy() for name, value in net.state_dict().items()}


def carry_out(filters: list[Any], tmp_path: Path, kind: str = DataKind.WEIGHT_DIFF) -> None:
    """Sends a client one task and filters its answer, as NVFlare's two runners do."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    weights = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    client = ClientTap(out=str(tmp_path / "client"), witnessed=str(tmp_path / "witnessed"))
    server = ServerTap(out=str(tmp_path / "server"))
    seen_by_server = context("server", peer="site-1")
    seen_by_server.set_prop(FLContextKey.TASK_DATA, order(weights), private=True, sticky=False)
    server.handle_event(EventType.AFTER_TASK_DATA_FILTER, seen_by_server)
    chain = [*filters, client]
    seen = context("site-1", Runner(*chain))
    seen.set_prop(FLContextKey.TASK_DATA, order(weights), private=True, sticky=False)
    client.handle_event(EventType.BEFORE_TASK_EXECUTION, seen)
    answer = trained(net)
    client.handle_event(EventType.AFTER_TASK_EXECUTION, seen)
    result = DXO(kind, answer, {"NUM_STEPS_CURRENT_ROUND": 1}).to_shareable()
    for each in chain:
        result = each.process(result, seen)
    seen_by_server.set_prop(FLContextKey.TASK_RESULT, result, private=True, sticky=False)
    server.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, seen_by_server)


def test_server_and_client_record_what_is_sent_and_let_out(tmp_path: Path) -> None:
    carry_out([PercentilePrivacy(gamma=1e-3)], tmp_path)
    for side in ("server", "client"):
        (exchange,) = read_exchanges(run_folder(tmp_path / side))
        assert (exchange.round, exchange.node_id) == (3, node_id("site-1"))
        assert exchange.message_id == TASK
        assert exchange.metrics["client"]["name"] == "site-1"
        largest = max(float(value.abs().max()) for value in exchange.read_reply().values())
        assert largest == pytest.approx(1e-3)
        assert exchange.read_broadcast().keys() == exchange.read_reply().keys()
    said = read_witnessed(tmp_path / "witnessed", exchange.run_id)
    assert said[TASK].said.images == 3
    assert said[TASK].said.settings["lr"] == 0.1


@pytest.mark.parametrize(
    ("filters", "kind", "names", "claimed"),
    [
        ([PercentilePrivacy()], DataKind.WEIGHT_DIFF, ["percentile_privacy"], None),
        ([SVTPrivacy()], DataKind.WEIGHT_DIFF, ["svt_privacy"], 0.1),
        (
            [PercentilePrivacy(), SVTPrivacy(epsilon=0.5)],
            DataKind.WEIGHT_DIFF,
            ["percentile_privacy", "svt_privacy"],
            0.5,
        ),
        # A filter that was made for differences and gets weights is another mechanism.
        ([SVTPrivacy()], DataKind.WEIGHTS, [], None),
        # These filters pass weights by.
        ([SVTPrivacy(data_kinds=[DataKind.WEIGHT_DIFF])], DataKind.WEIGHTS, [], None),
        # fedsim does not know this setting.
        ([SVTPrivacy(epsilon_query=0.05)], DataKind.WEIGHT_DIFF, [], None),
    ],
)
def test_filters_become_defenses(
    filters: list[Any], kind: str, names: list[str], claimed: float | None, tmp_path: Path
) -> None:
    carry_out(filters, tmp_path, kind)
    exchanges = read_exchanges(run_folder(tmp_path / "client"))
    parts = read_parts(run_folder(tmp_path / "client"), "mods")
    found = read_privacy(exchanges, {TASK: parts}, None).defenses
    assert found is not None
    assert [ref.name for ref in found.refs] == names
    if claimed is not None:
        assert found.refs[-1].parameters["epsilon"] == claimed
    said = read_witnessed(tmp_path / "witnessed", exchanges[0].run_id)
    assert said[TASK].said.mods == parts


def test_a_tap_changes_nothing_and_never_stops_a_job(tmp_path: Path) -> None:
    answer = {"w": np.ones(3, dtype=np.float32)}
    blocked = tmp_path / "file"
    blocked.write_text("")
    tap = ClientTap(out=str(blocked), witnessed=str(blocked))
    seen = context("site-1", Runner(tap))
    seen.set_prop(FLContextKey.TASK_DATA, order(answer), private=True, sticky=False)
    tap.handle_event(EventType.BEFORE_TASK_EXECUTION, seen)
    result = tap.process(DXO(DataKind.WEIGHT_DIFF, answer).to_shareable(), seen)
    assert np.array_equal(result["DXO"]["data"]["w"], answer["w"])
    assert not result["DXO"]["meta"]
