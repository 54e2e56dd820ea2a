"""The server of a federation knows the description of the data, and holds none of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from fedsim.federation import server_app
from fedsim.scenario.resolve import resolve
from fedsim.training.server import Server
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Table

IMAGES: dict[str, Any] = {
    "name": "wall",
    "seed": 3,
    "data": {"source": {"name": "digits", "size": 8}, "clients": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"rounds": 2, "local": {"batch_size": 4, "lr": 0.1}},
    "defenses": {"none": []},
    "attacks": [],
}
ROWS: dict[str, Any] = {
    "name": "rows",
    "seed": 3,
    "data": {"source": "diabetes", "clients": 3},
    "learner": {"name": "least_squares", "method": "ols"},
    "training": {"rounds": 1},
    "defenses": {"none": []},
    "attacks": [],
}


def reachable(root: object) -> Iterator[object]:
    """Everything that `root` leads to, but for modules and classes."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        one = waiting.pop()
        yield one
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, (type, type(gc))):
                seen.add(id(other))
                waiting.append(other)


def held(root: object, training: Tensor) -> list[object]:
    """What of `training` the object `root` leads to."""
    pointer = training.untyped_storage().data_ptr()
    found: list[object] = []
    for one in reachable(root):
        if isinstance(one, Tensor) and one.numel():
            if one.untyped_storage().data_ptr() == pointer:
                found.append(one)
        elif (isinstance(one, Dataset) and len(one.train_images)) or (
            isinstance(one, Table) and len(one.train_rows)
        ):
            found.append(one)
    return found


@pytest.mark.parametrize("document", [IMAGES, ROWS], ids=["images", "rows"])
def test_a_server_leads_to_no_training_example(document: dict[str, Any]) -> None:
    workload = Workload(resolve(document), "none")
    data = workload.dataset
    training = data.train_images if isinstance(data, Dataset) else data.train_rows
    assert held(workload, training)
    server = workload.server()
    assert type(server) is Server
    assert not held(server, training)


def test_the_engine_hands_the_server_app_no_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from fedsim.federation import federate

    handed: list[object] = []
    build = server_app.build

    def watched(server: Server, *others: Any) -> Any:
        handed.append(server)
        return build(server, *others)

    monkeypatch.setattr(server_app, "build", watched)
    federate(resolve(IMAGES), "none", tmp_path, resume=False, on_round=lambda _: None)
    assert [type(one) for one in handed] == [Server]


@pytest.mark.parametrize("document", [IMAGES, ROWS], ids=["images", "rows"])
def test_nothing_of_a_federation_can_be_overwritten(document: dict[str, Any]) -> None:
    """Another federation, or another client, is made: none becomes another one."""
    workload = Workload(resolve(document), "none")
    for one in (workload, workload.server(), workload.clients[0]):
        public = {name for name in dir(one) if not name.startswith("_")}
        assert {"dataset", "seed", "scenario"} & public
        for name in public | {"more"}:
            with pytest.raises((AttributeError, TypeError)):
                setattr(one, name, None)
            with pytest.raises((AttributeError, TypeError)):
                delattr(one, name)
    assert isinstance(workload.clients, tuple)
