"""Every partition divides the training set, by its seed alone, or says why it cannot."""

import json

import pytest
import torch

from fedsim.data.partition import partition
from fedsim.scenario.model import Partition
from fedsim.types import Dataset, FedsimError

COUNT, CLASSES = 120, 4
SOME = [
    Partition(),
    Partition(name="dirichlet", alpha=0.5),
    Partition(name="shards", shards_per_client=2),
    Partition(name="natural"),
]


def dataset(count=COUNT, client_of=True):
    return Dataset(
        name="made",
        train_images=torch.zeros(count, 1, 1, 1, dtype=torch.uint8),
        train_labels=torch.arange(count) * CLASSES // count,
        test_images=torch.zeros(0, 1, 1, 1, dtype=torch.uint8),
        test_labels=torch.zeros(0, dtype=torch.int64),
        mean=(0.0,),
        std=(1.0,),
        classes=tuple("abcd"),
        client_of=(torch.arange(count) * 7 % 5) * 10 if client_of else None,
    )


@pytest.mark.parametrize("config", SOME, ids=lambda config: config.name)
def test_parts_are_sorted_disjoint_and_cover(config):
    parts = partition(dataset(), config, 5, seed=1)
    assert len(parts) == 5
    assert torch.cat(parts).sort().values.tolist() == list(range(COUNT))
    for part in parts:
        assert part.dtype == torch.int64
        assert torch.equal(part, part.sort().values)


@pytest.mark.parametrize("config", SOME[:3], ids=lambda config: config.name)
def test_parts_are_a_function_of_the_seed(config):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = partition(dataset(), config, 5, seed=2**62 + 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = partition(dataset(), config, 5, seed=2**62 + 1)
    other = partition(dataset(), config, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (SOME[0], [[1, 4, 5, 9], [0, 2, 7, 10], [3, 6, 8, 11]]),
        (SOME[1], [[5, 7], [6], [0, 1, 2, 3, 4, 8, 9, 10, 11]]),
        (SOME[2], [[0, 3, 4, 5], [6, 7, 10, 11], [1, 2, 8, 9]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parts_are_those_of_flowers_partitioners(config, parts):
    """Written down from flwr-datasets 0.6.1, which divided data before."""
    assert [part.tolist() for part in partition(dataset(12), config, 3, seed=7)] == parts


@pytest.mark.parametrize(
    ("config", "data", "clients", "remedy"),
    [
        (Partition(name="dirichlet", alpha=1e-3), dataset(), 60, r"raise data\.partition\.alpha"),
        (
            Partition(name="shards", shards_per_client=7),
            dataset(),
            4,
            r"shards_per_client to 5 or 6 or 10",
        ),
        (
            Partition(name="shards", shards_per_client=2),
            dataset(),
            7,
            r"choose data\.clients so that it divides 120",
        ),
        (Partition(name="natural"), dataset(client_of=False), 5, "client_folders"),
        (Partition(name="natural"), dataset(), 4, r"set data\.clients to 5"),
        (Partition(name="file", path="absent.csv"), dataset(), 4, r"correct data\.partition\.path"),
    ],
)
def test_impossible_partitions_name_the_remedy(config, data, clients, remedy):
    with pytest.raises(FedsimError, match=remedy):
        partition(data, config, clients, seed=0)


def test_a_partition_with_too_few_images_for_a_client_is_refused():
    data = dataset()
    data.client_of[data.client_of == 30] = 20
    data.client_of[0] = 30
    with pytest.raises(FedsimError, match="leaves client 3 with 1 image, fewer than 2"):
        partition(data, Partition(name="natural"), 5, seed=0, min_images=2)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_file_says_whose_each_image_is(kind, encoding, tmp_path):
    owners = [(7 * index) % 3 for index in range(COUNT)]
    path = tmp_path / f"owners.{kind}"
    if kind == "json":
        path.write_text(json.dumps(owners), encoding)
    else:
        rows = [f"{index},{owner}" for index, owner in enumerate(owners)]
        path.write_text("\n".join(["index,client", *reversed(rows)]), encoding)
    parts = partition(dataset(), Partition(name="file", path=str(path)), 3, seed=0)
    for client, part in enumerate(parts):
        assert part.tolist() == [index for index in range(COUNT) if owners[index] == client]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "index,client\n0,0\n1,1", "exactly once"),
        ("a.csv", "number,client\n0,0", "columns index,client"),
        ("a.json", "[0, 1", "not understood"),
        ("a.json", "[" * 100_000 + "]" * 100_000, "not understood"),
        ("a.json", "[0, 1, 2]", "see client 2"),
    ],
)
def test_bad_partition_files_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    config = Partition(name="file", path=str(tmp_path / name))
    with pytest.raises(FedsimError, match=message):
        partition(dataset(3), config, 2, seed=0)
