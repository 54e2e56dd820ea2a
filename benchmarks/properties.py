"""Shares of classes, or of sex, in each client's data: from its updates, and through sums.

Of `--clients` clients, `--taking-part` are drawn in each round. The server sees their updates one
by one (`server`) or only the sum (`sum`), and who took part. Each line of the CSV file is a
federation, an attack and a number of rounds, with the mean error over clients beside that of
somebody who answers the mean of public data. Lines are added to the file.

    python benchmarks/properties.py --csv FILE [--table ../shared/data/tables.zip] [--seeds 1 2]

docs/results/membership-property.csv is of digits, and of Adult with `--table`, with 128 shadows and
seeds 1 to 3. Sums of 10 rounds that do not tell ten clients apart have no line.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from membership import adult, federate
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.metric import ScoredPair
from fedsim.contracts.target import HeldExamples, targets
from fedsim.data.images import public_examples
from fedsim.scenario import Scenario
from fedsim.scoring.statistics import summarize
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Truth


def scenario(options: argparse.Namespace, seed: int) -> Scenario:
    source: dict[str, Any] = {"name": "digits", "parameters": {"size": 8}}
    partition: dict[str, Any] = {"name": "dirichlet", "alpha": 0.3}
    if options.table:
        # Only says that rows come: `federate` hands over the table itself.
        source, partition = {"name": "breast_cancer"}, {"name": "natural"}
    return Scenario.model_validate(
        {
            "name": "properties",
            "seed": seed,
            "data": {"source": source, "clients": options.clients, "partition": partition},
            "model": {"name": "mlp", "parameters": {"hidden": [32]}},
            "training": {
                "algorithm": "fedavg",
                "rounds": max(options.rounds),
                "local": {"steps": 8, "batch_size": 16, "lr": 0.1},
            },
            "defenses": {"server": [], "sum": [{"name": "aggregate"}]},
            "attacks": [{"name": "property_inference"}],
            "observe": {"clients": "all"},
            "knowledge": {"public": "test"},
        }
    )


def load(options: argparse.Namespace, wanted: Scenario, seed: int) -> Dataset:
    """Returns digits, or Adult whose rows are dealt so that clients differ in the share of sex."""
    if not options.table:
        data = load_dataset(wanted)
        assert isinstance(data, Dataset)
        return data
    table = adult(options.table, options.limit).labelled()
    stream = torch.Generator().manual_seed(seed)
    shares = torch.rand(options.clients, generator=stream)
    female = table.train_images[:, _entry(table, "sex", "Female")] == 1
    chances = torch.where(female[:, None], shares, 1 - shares)
    dealt = torch.multinomial(chances, 1, generator=stream)[:, 0]
    return replace(table, client_of=dealt)


def _entry(table: Dataset, name: str, category: str) -> int:
    entries = [(c.name, each) for c in table.columns for each in c.categories or ("",)]
    return entries.index((name, category))


def errors(options: argparse.Namespace, workload: Workload, seen: Any) -> tuple[Tensor, Tensor]:
    """Returns the errors (n,) of the attack and of the public mean, of the last round's clients."""
    part = "client_column_shares" if options.table else "client_class_shares"
    target, data = targets()[part], workload.dataset
    assert isinstance(data, Dataset)
    images, labels = public_examples(data, workload.scenario.seed)
    parameters: dict[str, Any] = {"of": "clients", "shadows": options.shadows}
    if options.table:
        parameters["columns"] = ["sex"]
    attack, found, guessed = create("property_inference", parameters), [], []
    last = [each for each in seen if each.round == seen[-1].round]
    for asked in last:
        known = Knowledge(
            grant=Grant.least(public="test"), public_images=images, public_labels=labels, seen=seen
        )
        answer = target.answer_of(solve(attack, asked, known, seed=0).reconstruction)
        assert answer is not None
        own = [workload.clients[c] for c in asked.participants or (asked.client,)]
        true = torch.cat([_truth(target, client, data) for client in own])
        public = target.means_of(images, labels, len(data.classes))
        guess = torch.where(answer < 0, answer.double(), public)
        for claimed, into in ((answer, found), (guess, guessed)):
            value = target.ranking.compute(ScoredPair(claimed=claimed, truth=true))
            assert isinstance(value, Tensor)
            into.append(value)
    return torch.cat(found), torch.cat(guessed)


def _truth(target: Any, client: Any, data: Dataset) -> Tensor:
    held = HeldExamples(client.held, data.train_labels[client.own], len(data.classes))
    batch = Truth.of(
        {
            "images": data.train_images[:1],
            "labels": held.labels[:1],
            **({"columns": torch.zeros(1)} if data.columns else {}),
        }
    )
    left: Tensor = target.leave(batch, held)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="zip with Adult; default: digits")
    parser.add_argument("--limit", type=int, default=4000, help="rows of Adult")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--taking-part", type=int, nargs="+", default=[3])
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 40])
    parser.add_argument("--shadows", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    cells = itertools.product(options.seeds, ("server", "sum"), options.taking_part)
    for seed, stack, taking_part in cells:
        wanted = scenario(options, seed)
        workload = Workload(wanted, stack, load(options, wanted, seed))
        seen = federate(workload, max(options.rounds), taking_part, seed)
        for rounds in options.rounds:
            start = time.perf_counter()
            row: dict[str, Any] = {
                "data": "adult" if options.table else "digits",
                "property": "sex" if options.table else "classes",
                "seen": stack,
                "clients": options.clients,
                "taking_part": taking_part,
                "rounds": rounds,
                "seed": seed,
            }
            kept = tuple(each for each in seen if each.round <= rounds)
            try:
                found, guessed = errors(options, workload, kept)
            except AttackFailed as error:
                print(row, "failed:", error, flush=True)
                continue
            for name, values in (("error", found), ("guess", guessed), ("gain", guessed - found)):
                summary = summarize(values.tolist())
                ends = (summary.mean, summary.low, summary.high) if summary else ("",) * 3
                for ending, value in zip(("", "_low", "_high"), ends, strict=True):
                    row[name + ending] = value if value in ("", None) else round(value, 4)
            row |= {"n": len(found), "seconds": round(time.perf_counter() - start, 1)}
            new = not options.csv.exists()
            with options.csv.open("a", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
