"""Recordings: what is written is what is read, whole or not at all, and never outside the root."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.recording.files import (
    load_beside,
    load_observation,
    observation_id,
    read_tensors,
    save_observation,
    write_bytes,
    write_tensors,
)
from fedsim.recording.truth import load_truth, save_truth
from fedsim.types import (
    Effect,
    FedsimError,
    GroundTruth,
    LocalTraining,
    ModelSpec,
    Noise,
    Observation,
)

OBSERVATION = Observation(
    id="none/round-0001/client-0000-b2-t0",
    update={"w": torch.arange(6.0).view(2, 3), "b": torch.tensor([float("nan"), -1e-30])},
    buffers_update={"mean": torch.tensor([3.0])},
    parameters={"w": torch.ones(2, 3), "b": torch.zeros(2)},
    buffers={"mean": torch.tensor([1.0]), "count": torch.tensor(4)},
    spec=ModelSpec(
        name="mlp",
        parameters={"hidden": [4], "head": None},
        input_shape=(1, 2, 3),
        num_classes=2,
        mean=(0.5,),
        std=(0.25,),
    ),
    training=LocalTraining(algorithm="fedsgd", steps=1, batch_size=2, lr=0.1),
    defense=({"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "std": 0.5}),
    effect=Effect(scaled=True, bound=1.0, noise=(Noise(variance=0.25, on="update"),)),
    vantage="server",
    round=1,
    client=0,
    num_clients=1,
    trial=0,
    seed=7,
)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        torch.equal(left[n].nan_to_num(99), right[n].nan_to_num(99)) for n in left
    )


def test_an_observation_survives_the_disk_bit_for_bit(tmp_path: Path) -> None:
    path = save_observation(OBSERVATION, tmp_path)
    for suffix in (".json", ".safetensors"):
        read = load_observation(path.with_suffix(suffix))
        for field in ("update", "buffers_update", "parameters", "buffers"):
            assert same(getattr(read, field), getattr(OBSERVATION, field)), field
        plain = {"update": {}, "buffers_update": {}, "parameters": {}, "buffers": {}}
        assert replace(read, **plain) == replace(OBSERVATION, **plain)


def test_observations_of_a_round_share_one_file_of_global_weights(tmp_path: Path) -> None:
    save_observation(OBSERVATION, tmp_path)
    other = replace(OBSERVATION, id="none/round-0001/client-0001-b2-t0", client=1)
    folder = save_observation(other, tmp_path).parent
    assert sorted(p.name for p in folder.iterdir()) == [
        "client-0000-b2-t0.json",
        "client-0000-b2-t0.safetensors",
        "client-0001-b2-t0.json",
        "client-0001-b2-t0.safetensors",
        "global.safetensors",
    ]


def test_a_recording_holds_no_label_and_no_pixel(tmp_path: Path) -> None:
    """EVALUATION rule 5: truth lies in a file of its own, which a recording does not name."""
    truth = GroundTruth(images=torch.rand(2, 1, 2, 3), labels=torch.tensor([1, 0]))
    save_truth(truth, tmp_path, OBSERVATION.id, client=0)
    path = save_observation(OBSERVATION, tmp_path)
    assert "label" not in path.read_text() and "truth" not in path.read_text()
    names = set(read_tensors(path.with_suffix(".safetensors")))
    names |= set(read_tensors(path.with_name("global.safetensors")))
    assert {name.partition(".")[0] for name in names} == {"update", "buffer", "parameter"}


def test_truth_of_several_clients_is_joined_in_order_of_client(tmp_path: Path) -> None:
    for client in (10_000, 0, 9_999):
        part = GroundTruth(
            images=torch.full((1, 1, 2, 2), client / 16), labels=torch.tensor([client])
        )
        save_truth(part, tmp_path, "none/round-0001/aggregate-b1-t0", client)
    truth = load_truth(tmp_path, "none/round-0001/aggregate-b1-t0")
    assert truth.labels.tolist() == [0, 9_999, 10_000]
    assert truth.images[:, 0, 0, 0].tolist() == [0.0, 9_999 / 16, 625.0]
    load_truth(tmp_path, "none/round-0001/aggregate-b1-t0", clients=3)
    with pytest.raises(FedsimError, match="is of 3 clients and the observation of 2"):
        load_truth(tmp_path, "none/round-0001/aggregate-b1-t0", clients=2)


def test_a_watcher_sees_rounds_and_clients_in_order_of_their_numbers(tmp_path: Path) -> None:
    numbers = (9_999, 10_000)
    for round, client in product(numbers, numbers):
        id = observation_id("none", round, client, "training")
        attacked = replace(OBSERVATION, id=id, round=round, client=client)
        path = save_observation(attacked, tmp_path)
    seen = [(each.round, each.client) for each in load_beside(path, attacked)]
    assert seen == list(product(numbers, numbers))


@pytest.mark.parametrize(
    "id",
    [
        "../../etc/round-0001/client-0000-b1-t0",
        "none/round-0001/client-0000-b1-t0/../../x",
        "a..b/round-0001/client-0000-b1-t0",
        "/none/round-0001/client-0000-b1-t0",
        "none/round-1/client-0-b1-t0",
        "none\\round-0001\\client-0000-b1-t0",
        "",
    ],
)
def test_what_is_not_an_id_never_becomes_a_path(id: str, tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="not the id of an observation"):
        save_observation(replace(OBSERVATION, id=id), tmp_path)
    with pytest.raises(FedsimError, match="not the id of an observation"):
        load_truth(tmp_path, id)
    assert not any(tmp_path.rglob("*.safetensors"))


def test_a_changed_recording_is_refused(tmp_path: Path) -> None:
    path = save_observation(OBSERVATION, tmp_path)
    write_tensors(path.with_suffix(".safetensors"), {"update.w": torch.zeros(2, 3)})
    with pytest.raises(FedsimError, match="checksum"):
        load_observation(path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"format": 2}'])
def test_what_is_no_recording_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "client-0000-b2-t0.json"
    path.write_text(content)
    with pytest.raises(FedsimError, match="not a recording"):
        load_observation(path)
    with pytest.raises(FedsimError, match="no such recording"):
        load_observation(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"batch_size": 0}}, r"training\.batch_size: expected 1 to"),
        ({"training": {"steps": 10**12}}, r"training\.steps: expected 1 to"),
        ({"training": {"lr": 0.0}}, r"training\.lr: expected a finite number"),
        ({"training": {"momentum": float("nan")}}, r"training\.momentum"),
        ({"num_clients": -5}, "num_clients: expected 1 to"),
        ({"releases": 0}, "releases: expected 1 to"),
        ({"spec": {"num_classes": 0}}, r"model\.num_classes"),
        ({"spec": {"input_shape": (1, 10**9, 2)}}, r"model\.input_shape"),
        ({"spec": {"std": (0.0,)}}, r"model\.std: expected 1 finite"),
        ({"spec": {"mean": (0.5, 0.5)}}, r"model\.mean: expected 1 finite"),
        ({"update": {}}, "parameter w: named, but not recorded"),
        ({"update": {"w": torch.zeros(3, 2)}}, "parameter w: expected an update of"),
        ({"update": {"w": torch.zeros(2, 3, dtype=torch.int32)}}, "floating-point"),
        ({"parameters": {}, "update": {}}, "no parameters are named"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Its checksums are right, and an attack would stumble over it or answer something else."""
    nested = {
        name: replace(getattr(OBSERVATION, name), **value)
        for name, value in changes.items()
        if name in ("training", "spec")
    }
    path = save_observation(replace(OBSERVATION, **{**changes, **nested}), tmp_path)
    with pytest.raises(FedsimError, match=message):
        load_observation(path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"images": torch.zeros(1, 1, 2, 2)},
        {"images": torch.zeros(1, 2, 2), "labels": torch.zeros(1, dtype=torch.int64)},
        {"images": torch.zeros(1, 1, 2, 2), "labels": torch.zeros(2, dtype=torch.int64)},
        {"images": torch.zeros(1, 1, 2, 2), "labels": torch.tensor(1)},
        {"images": torch.zeros(1, 1, 2, 2), "labels": torch.tensor([-1])},
        {"images": torch.zeros(1, 1, 2, 2), "labels": torch.zeros(1)},
        {
            "images": torch.zeros(1, 1, 2, 2),
            "labels": torch.zeros(1, dtype=torch.int64),
            "local_losses": torch.zeros(3),
        },
        {"rows": torch.zeros(2, 3)},
        {"rows": torch.zeros(2, 3), "members": torch.ones(2), "scored": torch.ones(3)},
    ],
)
def test_what_is_no_ground_truth_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "truth" / OBSERVATION.id
    write_tensors(folder / "client-0000.safetensors", tensors)
    with pytest.raises(FedsimError, match="not the truth"):
        load_truth(tmp_path, OBSERVATION.id)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedsim.recording.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    """As the labels that an attack was granted and the true ones do."""
    labels = torch.arange(4)
    path = tmp_path / "shared.safetensors"
    write_tensors(path, {"truth": labels, "found": labels, "first": labels[:2]})
    found = read_tensors(path)
    assert torch.equal(found["truth"], labels) and torch.equal(found["found"], labels)
    assert torch.equal(found["first"], labels[:2])
