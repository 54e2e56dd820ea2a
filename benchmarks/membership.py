"""Membership estimators side by side on one federation: who trained on what, from its updates.

Clients train for `--rounds`, and attacks see the updates of `--observed` of these, evenly spaced.
Of each client `--candidates` examples are set aside by coins, and those of the first `--attacked`
clients are asked about. Scores of these clients count together.
An epoch is as many steps as cover a client's data once, each with a batch of its own.

Each cell (data, partition, B, epochs, seed, attack) is a line of the CSV file. Lines that are there
are not computed again, and nothing is begun after `--minutes`: call it again to go on.

    python benchmarks/membership.py --csv FILE [--images ../shared/data/cifar10-images.zip]
        [--batch-sizes 64] [--epochs 1] [--seeds 1] [--model convnet --width 8] [--alpha 0.5]

docs/results/membership-cifar.csv is of CIFAR-10 with `--lr` 0.01 and 0.08 and, in both cases,

    --limit 800 --clients 8 --attacked 3 --rounds 8 --observed 4 --batch-sizes 25 --epochs 2
    --seeds 1 2 --attacks update_membership cosine FedMIA-II "FedMIA-II, z" FedMIA-I "loss, mean"
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Grant, Knowledge, MembershipCandidates
from fedsim.contracts.metric import Unavailable
from fedsim.data.images import public_examples
from fedsim.scenario import Scenario
from fedsim.targets.membership import membership_auc, membership_tpr
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Observation

ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "loss, mean": ("loss_trajectory", {}),
    "loss, fall": ("loss_trajectory", {"summary": "fall"}),
    "FedMIA-I": ("fedmia", {"measure": "loss"}),
    "FedMIA-II": ("fedmia", {}),
    "FedMIA-II, z": ("fedmia", {"statistic": "z"}),
    "cosine": ("gradient_similarity", {}),
    "LiRA": ("shadow_likelihood", {"measure": "log_odds"}),
    "LiRA, cosine": ("shadow_likelihood", {}),
    "update_membership": ("update_membership", {}),
}
RATES = {"1_percent": 0.01, "01_percent": 0.001}
_Cell = tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What attacks on one federation are handed, and the coins of the attacked clients."""

    observations: tuple[Observation, ...]
    workload: Workload
    knowledge: Knowledge

    def ask(self, attack: str, parameters: dict[str, Any], client: int) -> tuple[Tensor, Tensor]:
        """Returns scores and coins of the candidates of `client`."""
        split = self.workload.clients[client].candidates
        assert split
        inputs, labels = self.workload.dataset.examples_at(split.examples)
        candidates = MembershipCandidates(inputs=inputs, labels=labels, seen=self.observations)
        last = [each for each in self.observations if each.client == client][-1]
        known = Knowledge(
            grant=self.knowledge.grant,
            public_images=self.knowledge.public_images,
            public_labels=self.knowledge.public_labels,
            candidates=candidates,
        )
        found = solve(create(attack, parameters), last, known, seed=client).reconstruction
        assert found.membership is not None
        return found.membership, split.members


def scenario(options: argparse.Namespace, size: int, epochs: int, seed: int) -> Scenario:
    images = options.images
    source: dict[str, Any] = {"name": "digits", "parameters": {"size": 8}}
    if images:
        where = {"path": str(images), "limit": options.limit}
        source = {"name": "image_folder", "parameters": where}
    partition: dict[str, Any] = {"name": "iid"}
    if options.alpha:
        partition = {"name": "dirichlet", "alpha": options.alpha}
    model: dict[str, Any] = {"name": options.model}
    if options.model == "convnet":
        model["parameters"] = {"width": options.width}
    return Scenario.model_validate(
        {
            "name": "membership",
            "seed": seed,
            "data": {"source": source, "clients": options.clients, "partition": partition},
            "model": model,
            "training": {
                "algorithm": "fedavg",
                "rounds": options.rounds,
                "local": {"steps": 1, "batch_size": size, "lr": options.lr},
            },
            "attacks": [{"name": "update_membership"}],
            "observe": {
                "rounds": ["last"],
                "clients": "all",
                "candidates": options.candidates,
            },
            "knowledge": {"public": "test"},
        }
    )


def with_epochs(wanted: Scenario, workload: Workload, epochs: int) -> Scenario:
    """Returns the scenario with local steps that cover a mean client's data `epochs` times."""
    held = sum(len(client.own) for client in workload.clients) / len(workload.clients)
    local = wanted.training.local
    local = local.model_copy(update={"steps": max(1, round(epochs * held / local.batch_size))})
    return wanted.model_copy(
        update={"training": wanted.training.model_copy(update={"local": local})}
    )


def federate(workload: Workload, rounds: int, observed: int) -> tuple[Observation, ...]:
    """Trains without Flower and returns what the server sees in the observed rounds.

    The next weights are the last ones plus the mean update, as FedAvg of equal clients makes them.
    """
    weights, buffers = workload.initial()
    kept = {round(1 + k * (rounds - 1) / max(1, observed - 1)) for k in range(observed)}
    seen: list[Observation] = []
    for number in range(1, rounds + 1):
        updates = [
            workload.client_update(client, number, weights, buffers, {}).update
            for client in range(len(workload.clients))
        ]
        if number in kept:
            seen += [
                workload.observation(number, client, update, weights, buffers)
                for client, update in enumerate(updates)
            ]
        weights = {
            name: value + torch.stack([u.tensors[name] for u in updates]).mean(0)
            for name, value in weights.items()
        }
    return tuple(seen)


def prepare(options: argparse.Namespace, size: int, epochs: int, seed: int) -> Seen:
    wanted = scenario(options, size, epochs, seed)
    data = load_dataset(wanted)
    assert isinstance(data, Dataset)
    wanted = with_epochs(wanted, Workload(wanted, "none", data), epochs)
    workload = Workload(wanted, "none", data)
    images, labels = public_examples(data, seed)
    granted = Grant.least(public="test")
    known = Knowledge(grant=granted, public_images=images, public_labels=labels)
    return Seen(federate(workload, options.rounds, options.observed), workload, known)


def row_of(scores: Tensor, members: Tensor) -> dict[str, Any]:
    """Returns the AUC, and shares of members told at each rate with Clopper and Pearson's ends."""
    inside = int(members.sum())
    row: dict[str, Any] = {
        "members": inside,
        "others": len(members) - inside,
        "auc": round(float(membership_auc(scores, members)), 4),  # type: ignore[arg-type]
    }
    for name, rate in RATES.items():
        share = membership_tpr(scores, members, rate)
        ends: tuple[Any, ...] = ("", "", "")
        if not isinstance(share, Unavailable):
            found = binomtest(round(share * inside), inside).proportion_ci(0.95, "exact")
            ends = tuple(round(float(each), 4) for each in (share, found.low, found.high))
        for ending, value in zip(("", "_low", "_high"), ends, strict=True):
            row[f"tpr_at_{name}{ending}"] = value
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--images", type=Path, help="folder or zip of images; default: digits")
    parser.add_argument("--limit", type=int, default=1000, help="training images of each class")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--attacked", type=int, default=2, help="clients whose candidates count")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--observed", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--alpha", type=float, help="of a Dirichlet partition; default: IID")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--shadows", type=int, default=64)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    for seed in options.seeds:
        for size in options.batch_sizes:
            for epochs in options.epochs:
                if not run_cell(options, size, epochs, seed, end):
                    return


def run_cell(options: argparse.Namespace, size: int, epochs: int, seed: int, end: float) -> bool:
    """Writes the lines of one federation that are missing; returns whether time is left."""
    shape = {
        "data": options.images.stem if options.images else "digits",
        "model": f"{options.model}-{options.width}"
        if options.model == "convnet"
        else options.model,
        "partition": f"dirichlet-{options.alpha}" if options.alpha else "iid",
        "clients": options.clients,
        "candidates": options.candidates,
        "attacked": options.attacked,
        "rounds": options.rounds,
        "observed": options.observed,
        "limit": options.limit if options.images else "",
        "lr": options.lr,
        "batch_size": size,
        "epochs": epochs,
        "seed": seed,
    }
    done = _done(options.csv)
    left = [name for name in options.attacks if _key({**shape, "attack": name}) not in done]
    if not left:
        return True
    if time.monotonic() > end:
        return False
    start = time.perf_counter()
    seen = prepare(options, size, epochs, seed)
    print(
        f"{time.perf_counter() - start:.0f} s",
        shape,
        f"trained; {len(seen.observations)} updates seen",
        flush=True,
    )
    for number, name in enumerate(left):
        # One attack at least, or a federation that takes all the time would be trained in vain.
        if number and time.monotonic() > end:
            return False
        plugin, parameters = ATTACKS[name]
        if plugin == "shadow_likelihood":
            parameters = {**parameters, "shadows": options.shadows}
        start = time.perf_counter()
        try:
            asked = [seen.ask(plugin, parameters, c) for c in range(options.attacked)]
        except AttackFailed as error:
            print(name, "failed:", error, flush=True)
            continue
        scores, members = (torch.cat(part) for part in zip(*asked, strict=True))
        row = {**shape, "attack": name, **row_of(scores, members)}
        row["seconds"] = round(time.perf_counter() - start, 1)
        _append(options.csv, row)
        print(row, flush=True)
    return True


_KEYS = 14
"""Number of first columns that say which cell a line is of."""


def _key(row: dict[str, Any]) -> _Cell:
    return tuple(str(value) for value in list(row.values())[:_KEYS])


def _done(path: Path) -> set[_Cell]:
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        return {_key(row) for row in csv.DictReader(file)}


def _append(path: Path, row: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
