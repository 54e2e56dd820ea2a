"""The KAN paper's theory beside measurement: margin, gradient bound, and risks with their slopes.

Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with Correlated Noise, 2026.
Its setting: two classes, logistic loss, a fixed second layer, batches of one size, clipping, noise
z_t - λ z_(t-1), and a projection on a ball around the first weights (Algorithm 1).

Points are uniform in [-1, 1]^d; the label is the sign of Σ_j sin(π x_j), and points near the
border are left out, so that Assumption 3.3 can hold. The population risk is that of fresh points.
Both risks are means over all iterates, as in the paper, each on as many points as a batch. Every
arm takes as many steps as it has examples. Noise has the multiplier that `correlated_gaussian`
proves for `fixed_size` batches at ε and δ = 1e-5 (`zero_out`), or one that does not depend on λ.

    python benchmarks/kan_theory.py measure > runs.jsonl            # about twelve minutes
    python benchmarks/kan_theory.py runs < runs.jsonl > docs/results/kan-theory.csv
    python benchmarks/kan_theory.py slopes < runs.jsonl > docs/results/kan-theory-slopes.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from fedsim.models.kan import basis_size, spline_basis
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCalibration
from fedsim.scoring import student_interval

Array = NDArray[np.float64]
DIMENSION, DEGREE, INTERVALS, DELTA = 4, 3, 4, 1e-5
BORDER, FRESH, BATCH, SEEDS = 0.5, 1000, 32, 5
LARGEST = 150
"""Examples that the margin is computed of, at most: its program has as many unknowns."""


@dataclass(frozen=True)
class Arm:
    """One setting of Algorithm 1."""

    study: str
    n: int = 400
    width: int = 32
    epsilon: float | None = None
    """None: no noise, unless `noise` says how much."""
    correlation: float = 0.0
    noise: float | None = None
    radius: float = 1e9
    clip: float = 1.0
    """Clipping norm of an example's gradient, which is never longer than the bound G."""
    rate: float = 8.0
    """Step size."""


WITHOUT, PRIVATE = Arm("", rate=32.0), Arm("", rate=2.0, clip=0.3)
"""The step sizes are the best of 0.5, 2, 8 and 32 on a seed that is used for nothing else."""
AT_8, AT_NOISE_3 = replace(PRIVATE, epsilon=8.0), replace(PRIVATE, noise=3.0)
IN_A_BALL = replace(AT_NOISE_3, study="λ, at noise 3, in a ball", radius=2.0)
LAMBDAS = (0.0, 0.5, 0.9)
ARMS = (
    *(replace(WITHOUT, study="n, without noise", n=n) for n in (100, 200, 400, 800, 1600)),
    *(replace(AT_8, study="n, at ε = 8", n=n) for n in (200, 400, 800, 1600)),
    *(replace(PRIVATE, study="ε", epsilon=epsilon) for epsilon in (2.0, 8.0, 32.0)),
    *(replace(WITHOUT, study="width, without noise", width=m) for m in (8, 32, 128)),
    *(replace(AT_8, study="width, at ε = 8", width=m) for m in (8, 32, 128)),
    *(replace(AT_8, study="λ, at ε = 8", correlation=c) for c in LAMBDAS),
    *(replace(AT_NOISE_3, study="λ, at noise 3", correlation=c) for c in LAMBDAS),
    *(replace(IN_A_BALL, correlation=c) for c in LAMBDAS),
    *(replace(WITHOUT, study="clipping norm", clip=norm) for norm in (0.03, 0.3)),
)


class Network:
    """f(x) = m^-½ Σ_k c_k · b(tanh(h_k)), h_k = d^-½ w_k · b(x): the fixed second layer is c."""

    def __init__(self, width: int, stream: torch.Generator) -> None:
        functions = basis_size(DEGREE, INTERVALS)
        options = {"generator": stream, "dtype": torch.float64}
        self.first = torch.randn(width, DIMENSION * functions, **options)
        self.second = torch.randn(width, functions, **options)

    def spread(self, x: Tensor) -> Tensor:
        """(n, d functions) values of the first layer's splines, which no weight moves."""
        return spline_basis(x, DEGREE, INTERVALS).flatten(1) / math.sqrt(DIMENSION)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, m) the terms of f, of (n, m) hidden units."""
        splines = spline_basis(hidden.tanh(), DEGREE, INTERVALS)
        return torch.einsum("nkb,kb->nk", splines, self.second) / math.sqrt(len(self.second))

    def values(self, weights: Tensor, spread: Tensor) -> Tensor:
        """(n,) values of f."""
        return torch.cat([self.forward(part @ weights.T).sum(1) for part in spread.split(1000)])

    def slopes(self, weights: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) values, and (n, m) u: the gradient of f by the weights is the outer u spread'."""
        hidden = (spread @ weights.T).requires_grad_()
        terms = self.forward(hidden)
        (slope,) = torch.autograd.grad(terms.sum(), hidden)
        return terms.sum(1).detach(), slope

    def gradient_bound(self) -> float:
        """G: no gradient of f is longer, whatever the weights and x (a sharp form of (5)).

        The splines of one entry are at least 0 and sum to 1, so that |spread| <= 1. Each unit's
        slope is at most its largest over all values of the unit.
        """
        units = torch.linspace(-6, 6, 2_001, dtype=torch.float64)[:, None]
        hidden = units.repeat(1, len(self.second)).requires_grad_()
        (slope,) = torch.autograd.grad(self.forward(hidden).sum(), hidden)
        return float(slope.abs().amax(0).norm())


def margin(network: Network, spread: Tensor, labels: Tensor) -> tuple[float, float]:
    """(proven, most) of γ (Assumption 3.3) of these examples; the first is attained by a direction.

    γ is the distance of 0 to the convex hull of y ∇f. The multipliers that minimize |Σ α y ∇f|² +
    (Σ α - 1)² are, scaled to sum to 1, those of the hull's nearest point.
    """
    spread, labels = spread[:LARGEST], labels[:LARGEST]
    _, slope = network.slopes(network.first, spread)
    gram = ((slope @ slope.T) * (spread @ spread.T) * torch.outer(labels, labels)).numpy()
    values, vectors = np.linalg.eigh(gram)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    stacked = np.vstack([root, np.ones(len(gram))])
    share, _ = nnls(stacked, np.eye(len(stacked))[-1], maxiter=100 * len(gram))
    share /= share.sum()
    nearest = math.sqrt(max(float(share @ gram @ share), 1e-300))
    return float((gram @ share).min()) / nearest, nearest


def points(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points with a margin, and their labels -1 and 1."""
    x = 2 * torch.rand(4 * count, DIMENSION, generator=stream, dtype=torch.float64) - 1
    signal = torch.sin(math.pi * x).sum(1)
    kept = torch.nonzero(signal.abs() > BORDER).flatten()[:count]
    return x[kept], signal[kept].sign()


def risk(values: Tensor, labels: Tensor) -> float:
    """The mean logistic loss."""
    return float(torch.nn.functional.softplus(-labels * values).mean())


@cache
def calibrated(epsilon: float, n: int, correlation: float) -> float:
    """The noise multiplier that is proven."""
    asked = CorrelatedCalibration(
        steps=n, sampling_rate=BATCH / n, correlation=correlation, sampling="fixed_size"
    )
    noise = asked.calibrate(epsilon, DELTA).noise_multiplier
    assert noise is not None
    return noise


def measure(arm: Arm, seed: int) -> dict[str, object]:
    """One run of Algorithm 1."""
    return {**trained(replace(arm, study=""), seed), "study": arm.study}


@cache
def trained(arm: Arm, seed: int) -> dict[str, object]:
    """The run itself; several studies share an arm."""
    stream = torch.Generator().manual_seed(seed)
    network = Network(arm.width, stream)
    x, y = points(arm.n, stream)
    fresh, truth = points(FRESH, stream)
    spread, fresh = network.spread(x), network.spread(fresh)
    lengths = spread.norm(dim=1)
    noise = calibrated(arm.epsilon, arm.n, arm.correlation) if arm.epsilon else arm.noise or 0.0
    weights, last = network.first.clone(), torch.zeros_like(network.first)
    empirical: list[float] = []
    population: list[float] = []
    clipped, longest, projected, farthest = 0, 0.0, 0, 0.0
    steps = arm.n
    for _ in range(steps):
        batch = torch.randperm(arm.n, generator=stream)[:BATCH]
        values, slope = network.slopes(weights, spread[batch])
        # Before the step its batch is as good as any other: its loss is the empirical risk's mean.
        empirical.append(risk(values, y[batch]))
        some = torch.randint(FRESH, (BATCH,), generator=stream)
        population.append(risk(network.values(weights, fresh[some]), truth[some]))
        loss_slope = -y[batch] * torch.sigmoid(-y[batch] * values)
        norms = loss_slope.abs() * slope.norm(dim=1) * lengths[batch]
        factors = (arm.clip / norms).clamp(max=1)
        clipped += int((norms > arm.clip).sum())
        longest = max(longest, float(norms.max()))
        gradient = ((factors * loss_slope)[:, None] * slope).T @ spread[batch]
        drawn = torch.randn(weights.shape, generator=stream, dtype=torch.float64)
        gradient += noise * arm.clip * (drawn - arm.correlation * last)
        last = drawn
        moved = weights - arm.rate * gradient / BATCH - network.first
        distance = float(moved.norm())
        projected += distance > arm.radius
        weights = network.first + moved * min(1.0, arm.radius / distance)
        farthest = max(farthest, min(distance, arm.radius))
    proven, most = margin(network, spread, y)
    return {
        **asdict(arm),
        "seed": seed,
        "noise_multiplier": noise,
        "empirical_risk": float(np.mean(empirical)),
        "population_risk": float(np.mean(population)),
        "clipped": clipped / (steps * BATCH),
        "projected": projected / steps,
        "farthest": farthest,
        "longest_gradient": longest,
        "gradient_bound": network.gradient_bound(),
        "margin": proven,
        "margin_at_most": most,
    }


MEASURED = ("empirical_risk", "population_risk")
MEANS = (
    "clipped",
    "projected",
    "farthest",
    "longest_gradient",
    "gradient_bound",
    "margin",
    "margin_at_most",
)
VARIABLES = {"n": "n", "ε": "epsilon", "width": "width", "λ": "correlation"}


def grouped(rows: list[dict[str, object]]) -> Iterator[tuple[Arm, list[dict[str, object]]]]:
    """The runs of each arm."""
    for arm in ARMS:
        wanted = asdict(arm)
        found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        if found:
            yield arm, found


def numbers(rows: list[dict[str, object]], name: str) -> list[float]:
    return [float(str(row[name])) for row in rows]


def table(rows: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """A line for each arm."""
    for arm, found in grouped(rows):
        line: dict[str, object] = {
            "study": arm.study,
            "n": arm.n,
            "width": arm.width,
            "epsilon": arm.epsilon or "",
            "correlation": arm.correlation,
            "noise_multiplier": f"{numbers(found, 'noise_multiplier')[0]:.4g}",
            "clip": arm.clip,
            "step_size": arm.rate,
            "radius": "" if arm.radius == 1e9 else arm.radius,
            "runs": len(found),
        }
        for name in MEASURED:
            values = numbers(found, name)
            low, high = student_interval(values)
            line |= {name: f"{np.mean(values):.4f}", f"{name}_low": f"{max(low, 0.0):.4f}"}
            line[f"{name}_high"] = f"{high:.4f}"
        yield line | {name: f"{np.mean(numbers(found, name)):.4g}" for name in MEANS}


def slopes(rows: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Slopes of log risk over the logarithm of what a study varies; of λ, over that of 1 - λ.

    A seed's arms share points and network. So each seed has a slope of its own, and the interval is
    that of their mean.
    """
    studies: dict[str, list[tuple[Arm, list[dict[str, object]]]]] = {}
    for arm, found in grouped(rows):
        studies.setdefault(arm.study, []).append((arm, found))
    for study, arms in studies.items():
        symbol = study.partition(",")[0]
        if symbol not in VARIABLES:
            continue
        for name in MEASURED:
            curves: dict[object, list[tuple[float, float]]] = {}
            for arm, found in arms:
                at = float(getattr(arm, VARIABLES[symbol]))
                place = math.log(1 - at if symbol == "λ" else at)
                for row in found:
                    point = place, math.log(float(str(row[name])))
                    curves.setdefault(row["seed"], []).append(point)
            fitted = [float(np.polyfit(*zip(*each, strict=True), 1)[0]) for each in curves.values()]
            low, high = student_interval(fitted)
            line = {
                "study": study,
                "risk": name.partition("_")[0],
                "over": "1 - λ" if symbol == "λ" else symbol,
                "slope": f"{np.mean(fitted):.2f}",
            }
            yield line | {"low": f"{low:.2f}", "high": f"{high:.2f}", "runs": len(fitted)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["measure", "runs", "slopes"])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--study", nargs="*", help="default: all")
    asked = parser.parse_args()
    if asked.what == "measure":
        torch.set_num_threads(1)
        for arm in ARMS:
            for seed in range(asked.seeds if not asked.study or arm.study in asked.study else 0):
                print(json.dumps(measure(arm, seed), ensure_ascii=False), flush=True)
        return
    rows = [json.loads(line) for line in sys.stdin]
    lines = list(table(rows) if asked.what == "runs" else slopes(rows))
    writer = csv.DictWriter(sys.stdout, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


if __name__ == "__main__":
    main()
