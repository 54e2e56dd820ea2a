"""Rule 19: a claim covers the whole road, from the images on a disk to what a client sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from plugins_here import registered
from safetensors.torch import save_file

from fedsim.audit import audited_epsilon
from fedsim.contracts.defense import global_norm
from fedsim.contracts.learner import DataSource
from fedsim.data.bundled import Digits
from fedsim.data.images import statistics
from fedsim.results import rows
from fedsim.scenario import Scenario
from fedsim.scenario.resolve import resolve
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Table, Tensors

NORM, COUNT = 0.1, 64
QUIET = 1e-6
"""A noise multiplier at which the noise is no thousandth of the sensitivity."""


def scenario(source: object, noise: float = QUIET, **changes: Any) -> Scenario:
    return resolve(
        {
            "name": "sensitivity",
            "seed": 3,
            "data": {"source": source, "clients": 1},
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"rounds": 1, "local": {"batch_size": COUNT, "lr": 0.1}},
            "defenses": {"dp": [{"name": "dp_sgd", "norm": NORM, "noise_multiplier": noise}]},
            "attacks": [],
            **changes,
        }
    )


def written(folder: Path, first: int, count: int = COUNT) -> str:
    """An image folder, whose first training image is of brightness `first`."""
    for split in ("train", "test"):
        for index in range(count):
            shade = first if (split, index) == ("train", 0) else 20 + index % 7
            path = folder / split / "ab"[index % 2] / f"{index:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), shade).save(path)
    return str(folder)


def released(world: Workload, parameters: Tensors, buffers: Tensors) -> Tensors:
    return world.client_update(0, 1, parameters, buffers, {}).update.tensors


def weights(world: Workload, scale: float) -> tuple[Tensors, Tensors]:
    """The global model, made worse by a server that wants one image to count for more."""
    parameters, buffers = world.initial()
    return {name: scale * value for name, value in parameters.items()}, buffers


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("normalization", ["declared", "training"])
def test_one_image_of_a_folder_moves_an_update_by_its_own_contribution(
    normalization: str, scale: float, tmp_path: Path
) -> None:
    """By 2 C / B at most; and where it moves more, nothing is claimed."""
    worlds = [
        Workload(
            scenario(
                {
                    "name": "image_folder",
                    "path": written(tmp_path / str(first), first),
                    "channels": 1,
                    "normalization": normalization,
                },
                noise=1.0 if normalization == "training" else QUIET,
            ),
            "dp",
        )
        for first in (20, 255)
    ]
    if normalization == "training":
        for world in worlds:
            claim = rows.spent(world, 1)
            assert claim.epsilon == float("inf")
            assert "mean and std of the training images" in str(claim.reason)
        return
    there, here = (released(world, *weights(worlds[0], scale)) for world in worlds)
    shift = float(global_norm({name: there[name] - here[name] for name in there}))
    assert 0 < shift <= 2 * NORM / COUNT * 1.01


def test_one_digit_moves_an_update_by_its_own_contribution() -> None:
    source = {"name": "digits", "size": 8}
    data = load_dataset(scenario(source))
    assert isinstance(data, Dataset)
    # Of all images, so that the exchanged one is in the batch.
    local = {"batch_size": len(data.train_labels), "lr": 0.1}
    here = Workload(scenario(source, training={"rounds": 1, "local": local}), "dp", data)
    pixels = data.train_images.clone()
    pixels[0] = 255 - pixels[0]
    there = here.of_neighbours(replace(data, train_images=pixels))
    for scale in (1.0, 4.0):
        start = weights(here, scale)
        found = [released(world, *start) for world in (here, there)]
        shift = float(global_norm({name: found[0][name] - found[1][name] for name in found[0]}))
        assert 0 < shift <= 2 * NORM / len(pixels) * 1.01


@pytest.mark.parametrize("partition", ["dirichlet", "shards"])
def test_a_partition_by_labels_voids_the_claim_of_an_example(partition: str) -> None:
    dealt: Mapping[str, Any] = {
        "dirichlet": {"name": "dirichlet", "alpha": 1.0},
        "shards": {"name": "shards", "shards_per_client": 1},
    }[partition]
    data = {"source": "digits", "clients": 2, "partition": dealt}
    noisy = [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 1.0}]
    dp = [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 1.0}]
    made = scenario("digits", data=data, defenses={"dp": dp, "client": noisy})
    claim = rows.spent(Workload(made, "dp"), 1)
    assert claim.epsilon == float("inf")
    assert f"partition {partition}" in str(claim.reason)
    assert rows.spent(Workload(made, "client"), 1).unit == "client", "whoever holds what"


def test_weights_of_unknown_origin_void_the_claim(tmp_path: Path) -> None:
    """They may be a model of the same images, trained without noise."""
    parameters, _ = Workload(scenario("digits", noise=1.0), "dp").initial()
    path = tmp_path / "weights.safetensors"
    save_file(dict(parameters), path)
    training = {"rounds": 1, "local": {"batch_size": COUNT, "lr": 0.1}, "weights": str(path)}
    undeclared = scenario("digits", noise=1.0, training=training)
    claim = rows.spent(Workload(undeclared, "dp"), 1)
    assert claim.epsilon == float("inf")
    assert "training.weights" in str(claim.reason)
    public = scenario("digits", noise=1.0, training=training, privacy={"weights": "public"})
    plain = rows.spent(Workload(scenario("digits", noise=1.0), "dp"), 1)
    assert rows.spent(Workload(public, "dp"), 1).epsilon == plain.epsilon < float("inf")


class Undeclared(DataSource):
    """Digits, by a third party that says nothing of its normalization."""

    def load(self) -> Dataset:
        return replace(Digits(size=8).load(), private_statistics=None)


class Lying(DataSource):
    """Digits normalized by their own statistics, said to be declared ones."""

    def load(self) -> Dataset:
        full = Digits(size=8).load()
        few = replace(full, train_images=full.train_images[:COUNT].contiguous())
        dark = replace(
            few, train_images=few.train_images // 64, train_labels=few.train_labels[:COUNT]
        )
        prepared = self.prepared(dark)
        assert isinstance(prepared, Dataset)
        return prepared

    def prepared(self, dataset: Dataset | Table) -> Dataset | Table:
        assert isinstance(dataset, Dataset)
        mean, std = statistics(dataset.train_images)
        return replace(dataset, mean=mean, std=std)


@pytest.fixture
def foreign() -> Iterator[None]:
    with registered({"data": {"undeclared": Undeclared, "lying": Lying}}):
        yield


@pytest.mark.usefixtures("foreign")
def test_a_source_that_does_not_say_claims_nothing() -> None:
    claim = rows.spent(Workload(scenario("undeclared", noise=1.0), "dp"), 1)
    assert claim.epsilon == float("inf")
    assert "private_statistics" in str(claim.reason)


@pytest.mark.slow
@pytest.mark.usefixtures("foreign")
def test_an_audit_sees_statistics_that_its_worlds_do_not_share() -> None:
    """The images of its two worlds differ in one, and all that is computed from them differs."""
    made = scenario("lying", noise=4.0, audit={"canaries": 300, "confidence": 0.99})
    audited = Workload(made, "dp", load_dataset(made))
    claim = rows.spent(audited, 1)
    assert made.audit is not None
    assert claim.epsilon < 5, "as it is claimed"
    found = audited_epsilon(audited, claim, made.audit, taken={(1,)})
    assert found > claim.epsilon


def relabelled(folder: Path, name: str, other: bool) -> str:
    """An image folder of four classes, whose first training image is of the first or the last."""
    for split in ("train", "test"):
        for index in range(COUNT):
            of = "d" if other and (split, index) == ("train", 0) else "abcd"[index % 4]
            own = index if name == "own" else index // 4
            path = folder / split / of / f"{own:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), index).save(path)
    return str(folder)


def of_folder(path: str, clients: int, **source: Any) -> Workload:
    given = {"name": "image_folder", "path": path, "channels": 1, **source}
    dealt = {"data": {"source": given, "clients": clients}}
    local = {"training": {"rounds": 1, "local": {"batch_size": 8, "lr": 0.1}}}
    return Workload(scenario(given, noise=1.0, **dealt, **local), "dp")


def test_the_label_of_an_image_moves_no_other_to_another_client(tmp_path: Path) -> None:
    """Files in the order of their classes would: the partition deals by places."""
    here, there = (
        of_folder(relabelled(tmp_path / str(other), "own", other), 4) for other in (False, True)
    )
    assert rows.spent(here, 1).epsilon < float("inf")
    data = [world.dataset for world in (here, there)]
    assert isinstance(data[0], Dataset)
    assert isinstance(data[1], Dataset)
    assert int((data[0].train_labels != data[1].train_labels).sum()) == 1
    assert data[0].train_images.equal(data[1].train_images)


def test_files_of_two_classes_that_share_a_name_void_a_claim_of_examples(tmp_path: Path) -> None:
    path = relabelled(tmp_path, "shared", other=False)
    found = rows.spent(of_folder(path, 4), 1)
    assert found.epsilon == float("inf")
    assert "share a name" in str(found.reason)
    assert rows.spent(of_folder(path, 1), 1).epsilon < float("inf"), "one client holds all"


def test_a_limit_by_classes_voids_a_claim(tmp_path: Path) -> None:
    """One image more of a class pushes another one out."""
    path = relabelled(tmp_path, "own", other=False)
    found = rows.spent(of_folder(path, 1, limit=COUNT // 4 - 1), 1)
    assert found.epsilon == float("inf")
    assert "limit" in str(found.reason)
    assert rows.spent(of_folder(path, 1, limit=COUNT // 4), 1).epsilon < float("inf")
