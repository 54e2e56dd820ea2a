"""Membership estimators side by side on one federation: who trained on what, from its updates.

Clients train for `--rounds`, and attacks see the updates of `--observed` of these, evenly spaced.
Of each client `--candidates` examples are set aside by coins, and those of the first `--attacked`
clients are asked about. Scores of these clients count together.
An epoch is as many steps as cover a client's data once, each with a batch of its own.
Behind a stack that shows sums alone, the sum is attacked, with the candidates of all its clients.

Each cell (data, partition, stack, B, epochs, seed, attack) is a line of the CSV file. Lines that
are there are not computed again, and nothing is begun after `--minutes`: call it again to go on.
`limit_*` is the most that the claim of all observed rounds allows (empty: it bounds nothing),
`claim_p` the p-value of that claim, and `blind_p` the least p-value of members that differ from
others before any update is seen. Ends of shares take the threshold as given,
though its rate is uncertain (docs/formats-results.md), and candidates for independent.

    python benchmarks/membership.py --csv FILE [--images ../shared/data/cifar10-images.zip]
        [--batch-sizes 64] [--epochs 1] [--seeds 1] [--model convnet --width 8] [--alpha 0.5]
        [--table ../shared/data/tables.zip] [--stacks none dp-8 sum] [--sampling poisson]

docs/results/membership-cifar.csv is of CIFAR-10 with `--sampling epochs` and

    --limit 800 --clients 8 --attacked 3 --rounds 8 --observed 4 --batch-sizes 25 --epochs 2
    --lr 0.01 --attacks update_membership cosine FedMIA-I FedMIA-II --seeds 1 2 3 4 5

or one thing changed: `--attacks "FedMIA-II, z"`; `--lr 0.08`; `--clients 10 --candidates 800
--rounds 60 --observed 6`; `--batch-sizes 16 64 256 --epochs 1 5`; `--candidates 250 --attacked 8`;
`--alpha 0.5 --candidates 400 --attacked 8`; `--model resnet18`. `--limit 800` is 500 images of each
client if all are candidates, for a coin takes half of them, and 875 with 250 candidates.

membership-adult.csv and membership-defenses.csv are of an MLP on Adult, both with

    --model mlp --width 128 --table ZIP --batch-sizes 25 --epochs 1 --lr 0.02 --rounds 8
    --observed 4 --public 300 --shadows 32 --clients 8 --attacked 8 --candidates 280 --limit 6400

and the former with `--sampling epochs`, also with `--alpha 2 --limit 12000`, the latter with
`--sampling poisson --attacks update_membership cosine --stacks none dp-1 dp-8 dp-50 pruned-0.9
pruned-0.99`. Sums there are of clients that train on 500 rows, `--stacks sum` with 4, 10 and 50
`--clients` and `--attacked`, 550, 220 and 44 `--candidates`, and a `--limit` of 3875, 7625 and
32500.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import tempfile
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Grant, Knowledge, MembershipCandidates
from fedsim.contracts.metric import Unavailable
from fedsim.data.images import public_examples
from fedsim.privacy.membership import (
    auc_limit,
    certain_rate,
    row_claim,
    share_p_value,
    tpr_limit,
)
from fedsim.scenario import Scenario
from fedsim.targets.membership import accused_others, blind_p_value, membership_auc, membership_tpr
from fedsim.training.accounting import spent
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Observation, Table

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


def _plugin(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


STACKS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    **{f"dp-{e}": [_plugin("dp_sgd", norm=1.0, epsilon=e)] for e in (1, 8, 50)},
    **{
        f"noise-{z}": [_plugin("clip", norm=1.0), _plugin("gaussian_noise", multiplier=z)]
        for z in (0.1, 1.0)
    },
    **{f"pruned-{share}": [_plugin("gradient_pruning", ratio=share)] for share in (0.9, 0.99)},
    "sum": [_plugin("aggregate")],
}
_Cell = tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What attacks on one federation are handed, and the coins of the attacked clients."""

    observations: tuple[Observation, ...]
    workload: Workload
    knowledge: Knowledge

    def ask(self, attack: str, parameters: dict[str, Any], client: int) -> tuple[Tensor, Tensor]:
        """Returns scores and coins of the candidates of `client`; -1: of all clients of a sum."""
        inputs, labels, members = self.asked(client)
        candidates = MembershipCandidates(inputs=inputs, labels=labels, seen=self.observations)
        last = [each for each in self.observations if each.client == client][-1]
        known = replace(self.knowledge, candidates=candidates)
        found = solve(create(attack, parameters), last, known, seed=client + 1).reconstruction
        assert found.membership is not None
        return found.membership, members

    def asked(self, client: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns inputs, labels and coins of the candidates of `client`; -1: of all clients."""
        clients = self.workload.clients
        each = []
        for one in clients if client < 0 else [clients[client]]:
            assert one.candidates
            inputs, labels = self.workload.dataset.examples_at(one.candidates.examples)
            each.append((inputs, labels, one.candidates.members))
        inputs, labels, members = (torch.cat(part) for part in zip(*each, strict=True))
        return inputs, labels, members

    def limits(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns ε, the most that it allows, and its p-value by the shares told in `row`."""
        claim = spent(self.workload.server(), self.observations[-1].round)
        sampled = self.workload.training.sizes_vary
        found: dict[str, Any] = {"epsilon": claim.epsilon, "limit_auc": "", "claim_p": ""}
        found |= dict.fromkeys((f"limit_at_{name}" for name in RATES), "")
        if claim.delta is None or claim.reason is not None:
            return found
        bounded = row_claim(claim.unit, claim.relation, claim.epsilon, claim.delta, sampled=sampled)
        if bounded is None:
            return found
        found["limit_auc"] = round(auc_limit(*bounded), 4)
        members, others, levels = row["members"], row["others"], []
        for name, rate in RATES.items():
            if accused := accused_others(others, rate):
                limit = tpr_limit(*bounded, certain_rate(accused, others))
                found[f"limit_at_{name}"] = round(limit, 4)
                told = round(row[f"tpr_at_{name}"] * members)
                levels.append(share_p_value(told, members, accused, others, *bounded))
        found["claim_p"] = f"{min(1.0, len(levels) * min(levels, default=1.0)):.2g}"
        return found


_ADULT = (
    "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,"
    "sex,capital-gain,capital-loss,hours-per-week,native-country,income"
)


def adult(path: Path, rows: int) -> Table:
    """Reads the first `rows` of Adult from its zip, without the columns of weights and of texts."""
    from fedsim.data.table import TableFile

    names = _ADULT.split(",")
    with zipfile.ZipFile(path) as zipped:
        text = zipped.read("adult/adult.data").decode()
    cells = [row for row in csv.reader(io.StringIO(text), skipinitialspace=True) if row][:rows]
    ranges = {
        "age": (17, 90),
        "education-num": (1, 16),
        "capital-gain": (0, 99999),
        "capital-loss": (0, 4356),
        "hours-per-week": (1, 99),
    }
    features: list[dict[str, Any]] = []
    for column, name in enumerate(names[:-1]):
        if name in ranges:
            features.append({"name": name, "low": ranges[name][0], "high": ranges[name][1]})
        elif name not in ("fnlwgt", "education"):
            # Categories are public: the data set's own description lists them.
            features.append({"name": name, "categories": sorted({row[column] for row in cells})})
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder, "adult.csv")
        with where.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([names, *cells])
        target = {"name": "income", "classes": ["<=50K", ">50K"]}
        return TableFile.model_validate(
            {"path": str(where), "features": features, "target": target}
        ).load()


def scenario(options: argparse.Namespace, stack: str, size: int, seed: int) -> Scenario:
    images = options.images
    source: dict[str, Any] = {"name": "digits", "parameters": {"size": 8}}
    if options.table:
        # Only says that rows come: `prepare` hands over the table itself.
        source = {"name": "breast_cancer"}
    if images:
        where = {"path": str(images), "limit": options.limit}
        source = {"name": "image_folder", "parameters": where}
    partition: dict[str, Any] = {"name": "iid"}
    if options.alpha:
        partition = {"name": "dirichlet", "alpha": options.alpha}
    model: dict[str, Any] = {"name": options.model}
    if options.model == "convnet":
        model["parameters"] = {"width": options.width}
    if options.model == "resnet18":
        # Statistics of batches depend on all of their images, and no example has its own gradient.
        model["parameters"] = {"width": options.width, "norm": "group"}
    if options.model == "mlp":
        model["parameters"] = {"hidden": [options.width]}
    return Scenario.model_validate(
        {
            "name": "membership",
            "seed": seed,
            "data": {"source": source, "clients": options.clients, "partition": partition},
            "model": model,
            "training": {
                "algorithm": "fedavg",
                "rounds": options.rounds,
                "local": {
                    "steps": 1,
                    "batch_size": size,
                    "lr": options.lr,
                    "sampling": options.sampling,
                },
            },
            "defenses": {stack: STACKS[stack]},
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
    # Under `epochs` the last and smaller batch of each is left out.
    each = held // local.batch_size if local.sampling == "epochs" else held / local.batch_size
    local = local.model_copy(update={"steps": max(1, round(epochs * each))})
    return wanted.model_copy(
        update={"training": wanted.training.model_copy(update={"local": local})}
    )


def federate(
    workload: Workload, rounds: int, taking_part: int, seed: int
) -> tuple[Observation, ...]:
    """Trains without Flower and returns what the server sees in all rounds.

    The next weights are the last ones plus the mean update, as FedAvg of equal clients makes them.
    """
    weights, buffers = workload.initial()
    seen: list[Observation] = []
    for number in range(1, rounds + 1):
        stream = rng.generator(seed, "taking part", number)
        drawn = torch.randperm(len(workload.clients), generator=stream)[:taking_part]
        who = tuple(drawn.sort().values.tolist())
        updates = [workload.client_update(c, number, weights, buffers, {}).update for c in who]
        mean = {n: torch.stack([u.tensors[n] for u in updates]).mean(0) for n in weights}
        if workload.stack.aggregation:
            combined = workload.combine_updates(updates, number)
            summed = workload.observation(
                number, -1, combined, weights, buffers, num_clients=len(who)
            )
            seen.append(replace(summed, participants=who))
        else:
            seen += [
                workload.observation(number, client, update, weights, buffers)
                for client, update in zip(who, updates, strict=True)
            ]
        weights = {name: value + mean[name] for name, value in weights.items()}
    return tuple(seen)


def prepare(options: argparse.Namespace, stack: str, size: int, epochs: int, seed: int) -> Seen:
    wanted = scenario(options, stack, size, seed)
    data: Any = adult(options.table, options.limit) if options.table else load_dataset(wanted)
    if isinstance(data, Table):
        data = data.labelled()
    assert isinstance(data, Dataset)
    # The stack's noise depends on the number of steps, which depends on what clients hold.
    undefended = wanted.model_copy(update={"defenses": {stack: []}})
    wanted = with_epochs(wanted, Workload(undefended, stack, data), epochs)
    workload = Workload(wanted, stack, data)
    images, labels = public_examples(data, seed)
    granted = Grant.least(public="test")
    known = Knowledge(grant=granted, public_images=images, public_labels=labels)
    rounds, observed = options.rounds, options.observed
    kept = {round(1 + k * (rounds - 1) / max(1, observed - 1)) for k in range(observed)}
    seen = federate(workload, rounds, len(workload.clients), seed)
    return Seen(tuple(each for each in seen if each.round in kept), workload, known)


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
    parser.add_argument("--table", type=Path, help="zip with Adult, instead of images")
    parser.add_argument("--limit", type=int, default=1000, help="images of each class, or rows")
    parser.add_argument("--stacks", nargs="+", choices=list(STACKS), default=["none"])
    parser.add_argument("--sampling", default="without_replacement")
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
    parser.add_argument("--public", type=int, default=1000, help="examples for update_membership")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    # Seeds come first: what is there when time is over compares the same cells.
    cells = itertools.product(options.seeds, options.stacks, options.batch_sizes, options.epochs)
    for seed, stack, size, epochs in cells:
        if not run_cell(options, (stack, size, epochs, seed), end):
            return


def run_cell(options: argparse.Namespace, cell: tuple[str, int, int, int], end: float) -> bool:
    """Writes the lines of one federation that are missing; returns whether time is left.

    `cell` has the stack, the batch size, the number of epochs and the seed.
    """
    stack, size, epochs, seed = cell
    shape = {
        "data": "adult" if options.table else options.images.stem if options.images else "digits",
        "model": f"{options.model}-{options.width}",
        "partition": f"dirichlet-{options.alpha}" if options.alpha else "iid",
        "clients": options.clients,
        "candidates": options.candidates,
        "attacked": options.attacked,
        "rounds": options.rounds,
        "observed": options.observed,
        "limit": options.limit if options.images or options.table else "",
        "lr": options.lr,
        "batch_size": size,
        "epochs": epochs,
        "seed": seed,
        "stack": stack,
        "sampling": options.sampling,
    }
    done = _done(options.csv)
    left = [name for name in options.attacks if _key({**shape, "attack": name}) not in done]
    if not left:
        return True
    if time.monotonic() > end:
        return False
    start = time.perf_counter()
    seen = prepare(options, stack, size, epochs, seed)
    summed = seen.workload.stack.aggregation is not None
    attacked = [-1] if summed else range(options.attacked)
    blind = min(blind_p_value(*seen.asked(client)) for client in attacked)
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
        if plugin == "update_membership":
            parameters = {**parameters, "public": options.public}
        start = time.perf_counter()
        try:
            asked = [seen.ask(plugin, parameters, client) for client in attacked]
        except AttackFailed as error:
            print(name, "failed:", error, flush=True)
            continue
        scores, members = (torch.cat(part) for part in zip(*asked, strict=True))
        row = {**shape, "attack": name, **row_of(scores, members)}
        row |= {**seen.limits(row), "blind_p": f"{blind:.2g}"}
        row["seconds"] = round(time.perf_counter() - start, 1)
        _append(options.csv, row)
        print(row, flush=True)
    return True


_KEYS = 16
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
