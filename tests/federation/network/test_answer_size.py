"""How much of a node's answer the run reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.runtime import RuntimeHttpClient
from network_support import superlink, until
from nodes_support import TINY

from fedsim.federation.deployment import most_bytes
from fedsim.federation.network.flower import BoundedGrid
from fedsim.federation.secure_aggregation import plan
from fedsim.scenario import resolve
from fedsim.training.workload import Workload


def test_no_more_of_an_answer_is_read_than_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pull = RuntimeHttpClient.PullObject

    def watched(self: RuntimeHttpClient, request: Any) -> Any:
        answer = pull(self, request)
        read.append(len(answer.object_content))
        return answer

    monkeypatch.setattr(RuntimeHttpClient, "PullObject", watched)
    with superlink(tmp_path) as link, link.run(BoundedGrid) as grid, link.node(None) as node:
        assert isinstance(grid, BoundedGrid)
        grid.most_bytes = 100_000

        def answered(count: int, size: int) -> Message:
            read.clear()
            order = RecordDict({"order": ConfigRecord({"count": count})})
            sent = list(grid.push_messages([Message(order, node.identifier, "train")]))
            arrays = [np.full(size, number, np.uint8) for number in range(count)]
            content = RecordDict({"arrays": ArrayRecord(arrays)})
            node.push(Message(content, reply_to=node.pull()))
            (reply,) = until(lambda: list(grid.pull_messages(sent)), "an answer")
            assert isinstance(reply, Message)
            return reply

        for count, size, is_read in ((3, 10_000, True), (50, 50_000, False), (1, 3_000_000, False)):
            for _ in range(2):
                assert answered(count, size).has_content() == is_read
                assert sum(read) < 100_000
            assert answered(2, 100).has_content(), "the next one counts for itself"


@pytest.mark.parametrize("secure", [False, True])
def test_an_answer_may_have_what_is_asked_for(secure: bool) -> None:
    stack = [{"name": "clip", "norm": 1.0}, "secure_aggregation"] if secure else []
    workload = Workload(resolve({**TINY, "defenses": {"one": stack}}), "one")
    parameters, _ = workload.initial()
    model = sum(tensor.nbytes for tensor in parameters.values())
    layout = plan.layout(workload, TINY["training"]["rounds"]) if secure else None
    asked = len(layout.sums) * layout.length * 4 if layout else model
    assert asked < most_bytes(workload) < 2 * asked + 2 * 2**20
