"""Does correlated noise pay once it is accounted honestly? Accuracy of a KAN at equal ε.

A KAN learns the bundled digits, or images of a folder or zip with `train/` and `test/`, reduced to
8x8 pixels, by DP-CGD: the model, the clipping and the noise are those of
`kan` and `correlated_noise`, the noise multiplier of each (accounting, ε, λ) is calibrated by
`fedsim.privacy`. Every arm chooses among the same learning rates on a seed that is used for nothing
else, and is measured at the best on others; the arms share weights, batches and z_t. Prints JSON
lines; `--report` turns files of them into a table and a plot.

    python benchmarks/kan.py [--accounting balls_in_bins fixed_size paper] [--epsilon 1 3 8]
        [--correlation 0 0.3 0.5 0.7 0.9] [--seeds 5] [--rates 1 2.5 6 15 40]
        [--images cifar10-images.zip --limit 500] > figures.jsonl
    python benchmarks/kan.py --report figures.jsonl [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor
from torch.func import functional_call

from fedsim import rng
from fedsim.data.bundled import Digits
from fedsim.data.folder import ImageFolder
from fedsim.models.base import Classifier, build, normalize
from fedsim.models.local import loss_function
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCalibration
from fedsim.testing.cases import local_step
from fedsim.types import Dataset, LocalTraining, ModelSpec, as_pixels
from fedsim_defenses.correlated_noise import CorrelatedNoise

STEPS, BINS, DELTA, NORM, SIDE = 300, 10, 1e-4, 0.5, 8
MODEL = {"hidden": 16, "intervals": 4, "init_scale": 0.5}
TUNING_SEED = 1000
NAMES = {
    "balls_in_bins": "balls-in-bins, exact",
    "fixed_size": "fixed-size batches, exact",
    "paper": "fixed-size batches, Theorem F.12",
}


class Bench:
    """The data and the model of one run after another."""

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self._spec = ModelSpec(
            name="kan",
            parameters=MODEL,
            input_shape=self._data.input_spec.input_shape,
            num_classes=len(self._data.classes),
            mean=self._data.mean,
            std=self._data.std,
        )
        self._train = normalize(as_pixels(self._data.train_images), self._spec)
        self._test = normalize(as_pixels(self._data.test_images), self._spec)
        self.batch_size = round(len(self._train) / BINS)
        self.sampling_rate = self.batch_size / len(self._train)

    def accuracy(
        self, sampling: str, noise: float, correlation: float, rate: float, seed: int
    ) -> float:
        """Test accuracy after all steps."""
        model: Classifier = build(self._spec, rng.derive(seed, "model"))
        size = self.batch_size
        training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=size, lr=rate)
        loss = loss_function(model, {}, training)
        defense = CorrelatedNoise(norm=NORM, noise_multiplier=noise, correlation=correlation)
        direction = defense.gradient(local_step(loss, _unused, size))
        weights = {name: value.detach() for name, value in model.named_parameters()}
        stream = rng.generator(seed, "noise")
        for batch in self._batches(sampling, seed):
            step = direction(weights, self._train[batch], self._data.train_labels[batch], stream)
            weights = {name: value - rate * step[name] for name, value in weights.items()}
        found = functional_call(model, weights, (self._test,)).argmax(1)
        return float((found == self._data.test_labels).double().mean())

    def _batches(self, sampling: str, seed: int) -> Iterator[Tensor]:
        stream, count = rng.generator(seed, "batches"), len(self._train)
        if sampling == "balls_in_bins":
            bins = torch.randint(BINS, (count,), generator=stream)
            for step in range(STEPS):
                yield torch.nonzero(bins == step % BINS).flatten()
        else:
            for _ in range(STEPS):
                yield torch.randperm(count, generator=stream)[: self.batch_size]


def _unused(*_: object) -> dict[str, Tensor]:
    raise AssertionError("correlated_noise computes gradients of its own")


def calibrated(accounting: str, epsilon: float, correlation: float, rate: float) -> float:
    """The noise multiplier that `accounting` asks for."""
    exact = accounting != "paper"
    asked = CorrelatedCalibration(
        steps=STEPS,
        sampling_rate=1 / BINS if accounting == "balls_in_bins" else rate,
        correlation=correlation,
        sampling="balls_in_bins" if accounting == "balls_in_bins" else "fixed_size",
        variant="exact" if exact else "paper",
        draws=50_000,
    )
    noise = asked.calibrate(epsilon, DELTA).noise_multiplier
    assert noise is not None
    return noise


def measure(
    bench: Bench,
    accounting: str,
    epsilon: float,
    correlation: float,
    seeds: int,
    rates: list[float],
) -> dict[str, Any]:
    """One arm at one ε."""
    noise = calibrated(accounting, epsilon, correlation, bench.sampling_rate)
    tried: dict[float, float] = {}

    def tuned(rate: float) -> float:
        if rate not in tried:
            tried[rate] = bench.accuracy(accounting, noise, correlation, rate, TUNING_SEED)
        return tried[rate]

    best = climb(tuned, rates)
    found = [bench.accuracy(accounting, noise, correlation, best, seed) for seed in range(seeds)]
    return {
        "accounting": accounting,
        "epsilon": epsilon,
        "correlation": correlation,
        "noise_multiplier": noise,
        "rate": best,
        "tried": tried,
        "accuracy": found,
    }


def climb(of: Callable[[float], float], rates: list[float]) -> float:
    """The best learning rate, found from the middle of `rates` by going uphill."""
    at = len(rates) // 2
    while True:
        around = range(max(0, at - 1), min(len(rates), at + 2))
        best = max(around, key=lambda index: of(rates[index]))
        if best == at:
            return rates[at]
        at = best


def spread(values: list[float]) -> tuple[float, float]:
    """(mean, half of the 95% interval by Student's t)."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), float(half)


def report(rows: list[dict[str, Any]], plot: Path | None) -> None:
    """Print a Markdown table, and draw."""
    print("| accounting | ε | λ | noise multiplier | lr | accuracy | against λ = 0 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    plain = {(r["accounting"], r["epsilon"]): r for r in rows if r["correlation"] == 0}
    for row in rows:
        mean, half = spread(row["accuracy"])
        base = plain[row["accounting"], row["epsilon"]]
        pairs = [b - a for a, b in zip(base["accuracy"], row["accuracy"], strict=True)]
        difference = "" if row is base else "{:+.3f} ± {:.3f}".format(*spread(pairs))
        print(
            f"| {NAMES[row['accounting']]} | {row['epsilon']:g} | {row['correlation']} | "
            f"{row['noise_multiplier']:.3g} | {row['rate']:g} | {mean:.3f} ± {half:.3f} | "
            f"{difference} |"
        )
    if plot:
        draw(rows, plot)


def draw(rows: list[dict[str, Any]], plot: Path) -> None:
    """A panel for each ε, a line over λ for each accounting."""
    import matplotlib.pyplot as plt

    budgets = sorted({row["epsilon"] for row in rows})
    figure, _ = plt.subplots(1, len(budgets), figsize=(3.4 * len(budgets) + 1, 3.2), sharey=True)
    for axes, epsilon in zip(figure.axes, budgets, strict=True):
        for name, label in NAMES.items():
            line = sorted(
                (r for r in rows if (r["accounting"], r["epsilon"]) == (name, epsilon)),
                key=lambda r: r["correlation"],
            )
            if line:
                means, halves = zip(*(spread(r["accuracy"]) for r in line), strict=True)
                at = [r["correlation"] for r in line]
                axes.errorbar(at, means, halves, label=label, marker="o", capsize=3)
        axes.axhline(0.1, color="grey", linestyle=":")
        axes.set(title=f"ε = {epsilon:g}", xlabel="correlation λ", ylim=(0, 1))
    figure.axes[0].set_ylabel("test accuracy")
    fullest = max(figure.axes, key=lambda axes: len(axes.get_lines()))
    fullest.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(plot, dpi=100)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accounting", nargs="*", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--epsilon", nargs="*", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--correlation", nargs="*", type=float, default=[0, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", nargs="*", type=float, default=[1.0, 2.5, 6.0, 15.0, 40.0])
    parser.add_argument("--images", type=Path, help="default: the bundled digits")
    parser.add_argument("--limit", type=int, help="images of each class in each split")
    parser.add_argument("--report", nargs="*", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    if asked.report:
        lines = [line for file in asked.report for line in file.read_text().splitlines()]
        report([json.loads(line) for line in lines], asked.plot)
        return
    torch.set_num_threads(1)
    if asked.images:
        bench = Bench(ImageFolder(path=str(asked.images), size=SIDE, limit=asked.limit).load())
    else:
        bench = Bench(Digits(size=SIDE).load())
    for accounting in asked.accounting:
        for epsilon in asked.epsilon:
            for correlation in asked.correlation:
                row = measure(bench, accounting, epsilon, correlation, asked.seeds, asked.rates)
                print(json.dumps(row), flush=True)
                print(accounting, epsilon, correlation, file=sys.stderr)


if __name__ == "__main__":
    main()
