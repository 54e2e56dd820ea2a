"""Which choices bring `tensor_features` to the level that its paper reports at d = 512.

Table 2 of Liu et al., Data Reconstruction Attacks and Defenses, has a span error of 0.171 for one
image and 0.175 for eight. `theory` prints what decides it for one image, in closed form: the
leading term of the error for each activation, scale of W and estimator, the neurons that 0.171
takes, and whether the conditions of the paper's Theorem B.1 hold. `measure` attacks random
features, n draws a cell, and prints one JSON line a cell: mean, 95% Student's interval of it, and
seconds. `designs` has one image under W that a server may draw otherwise than the paper does:
orthogonal blocks of d rows, pairs w and -w, and both.

    python benchmarks/tensor_level.py theory
    python benchmarks/tensor_level.py designs [--draws 3] [--planted 14336]
    python benchmarks/tensor_level.py measure [--draws 3] [--batches 1 8] [--forms plain improved]
        [--planted 14336] [--alike 0 0.46] [--std 1] [--norm 1] [--activation relu] [--rows graded]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import activation
from fedsim.scoring import score
from fedsim.scoring.statistics import summarize
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.head_features import tensor_features
from fedsim_attacks.head_features.tensor_features import power_method

DIMENSION, CLASSES = 512, 10
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"variance_reduction": True},
    "whitened": {"variance_reduction": True, "whiten": True},
    "all_rows": {"rows": "all"},
    "improved": {"variance_reduction": True, "whiten": True, "rows": "all"},
}
"""Name: options of `tensor_features`."""
REPORTED = {1: 0.171, 2: 0.171, 4: 0.174, 8: 0.175}
"""B: span error of the paper's Table 2 without a defense."""
SCALES = (0.2, 1.0, 5.0, 38.0)
_LOGITS = 0.38
"""Gain of the planted rows times the scale of W'x: that of table2.yaml, whose features have a norm
of 38 and whose gain is 0.01."""


def features(count: int, alike: float, norm: float, draw: int) -> Tensor:
    """Random (count, d) of length `norm` with a pairwise cosine of about `alike`."""
    stream = rng.generator(draw, "level", count)
    own = F.normalize(torch.randn(count, DIMENSION, generator=stream), dim=1)
    common = F.normalize(torch.randn(1, DIMENSION, generator=stream), dim=1)
    return norm * F.normalize(alike**0.5 * common + (1 - alike) ** 0.5 * own, dim=1)


def observe(
    count: int, draw: int, alike: float, norm: float, distinct: bool, **head: Any
) -> tuple[Observation, GroundTruth]:
    """The gradient of a batch of such features under a head that is wholly planted."""
    stream = rng.generator(draw, "labels", count)
    labels = torch.randint(CLASSES, (count,), generator=stream)
    if distinct:
        labels = torch.randperm(CLASSES, generator=stream)[:count]
    # The model normalizes images back to the features: its mean is 0.4, its deviation 0.25.
    images = (0.4 + 0.25 * features(count, alike, norm, draw)).view(count, 1, 16, -1)
    return make_observation(
        images,
        labels,
        model="mlp",
        model_parameters={"hidden": [], "head": {"width": head["planted"], **head}},
        seed=draw,
    )


def measure(arguments: argparse.Namespace) -> None:
    """Every combination of the choices, forms side by side on the same observations."""
    names = ("batches", "planted", "alike", "std", "norm", "activation", "rows")
    for cell in itertools.product(*(getattr(arguments, name) for name in names)):
        count, planted, alike, std, norm, kind, rows = cell
        errors: dict[str, list[float]] = {form: [] for form in arguments.forms}
        seconds: dict[str, list[float]] = {form: [] for form in arguments.forms}
        for draw in range(arguments.draws):
            observed, truth = observe(
                count,
                draw,
                alike,
                norm,
                arguments.distinct,
                planted=planted,
                planted_std=std,
                planted_gain=_LOGITS / (std * norm),
                planted_rows=rows,
                activation=kind,
            )
            for form in arguments.forms:
                start = time.perf_counter()
                found = solve(
                    create("tensor_features", FORMS[form]), observed, Knowledge(), seed=draw
                )
                seconds[form].append(time.perf_counter() - start)
                error = score(found.reconstruction, truth)["subspace_error"]
                assert error is not None
                errors[form].append(error)
        for form in arguments.forms:
            row = dict(zip(names, cell, strict=True)) | {
                "distinct": arguments.distinct,
                "form": form,
                "error": round(statistics.mean(errors[form]), 4),
                "interval": bounds(errors[form]),
                "n": arguments.draws,
                "seconds": round(statistics.median(seconds[form]), 1),
                "paper": REPORTED.get(count),
            }
            print(json.dumps(row), flush=True)


def designs(draws: int, neurons: int) -> None:
    """The plain estimator and regression on W, for one image under ReLU."""
    for name in ("gaussian", "pairs", "blocks", "pairs of blocks"):
        errors: dict[str, list[float]] = {"plain": [], "reduced": []}
        for draw in range(draws):
            stream = rng.generator(draw, "design", name)
            w = draw_weights(name, neurons, stream)
            feature = F.normalize(torch.randn(DIMENSION, generator=stream), dim=0)
            g = (w @ feature).relu()
            design = torch.cat([torch.ones(len(w), 1), w], 1)
            linear = design @ torch.linalg.solve(design.T @ design, design.T @ g)
            for form, values in (("plain", g), ("reduced", g - linear)):
                moment = tensor_features.second_moment(values, w).double()
                basis = power_method([moment], 1, 100, rng.generator(draw, "power"))[:, 0]
                cosine = float(basis @ feature.double()) / float(feature.double().norm())
                errors[form].append(math.sqrt(max(0.0, 1 - cosine**2)))
        for form, values in errors.items():
            row = {"design": name, "neurons": neurons, "form": form, "n": draws}
            row |= {"error": round(statistics.mean(values), 4), "interval": bounds(values)}
            print(json.dumps(row), flush=True)


def draw_weights(name: str, neurons: int, stream: torch.Generator) -> Tensor:
    """(m, d) with E[w w'] = I; `neurons` a multiple of 2 d for whole blocks."""
    count = neurons // 2 if name.startswith("pairs") else neurons
    if name.endswith("blocks"):
        square = torch.randn(count // DIMENSION, DIMENSION, DIMENSION, generator=stream)
        w = torch.linalg.qr(square)[0].flatten(0, 1) * DIMENSION**0.5
    else:
        w = torch.randn(count, DIMENSION, generator=stream)
    return torch.cat([w, -w]) if name.startswith("pairs") else w


def bounds(values: list[float]) -> list[float] | None:
    """The 95% Student's interval of the mean; None of fewer than three values."""
    summary = summarize(values)
    if summary is None or summary.low is None or summary.high is None:
        return None
    return [round(summary.low, 4), round(summary.high, 4)]


def leading_ratios(name: str, scale: float) -> dict[str, float] | None:
    """Form: what of σ(scale z) decides the error for one unit feature; None where k_2 is not 2.

    P̂ x off x is (1/m) Σ g_j z_j w_⊥j, of variance E[g² z²] / m in each of d - 1 directions, beside
    the signal E[σ'']: the tangent of the error is sqrt((d - 1) / m) sqrt(E[g² z²]) / |E[σ'']|
    to first order. Regression on W takes the constant and linear part out of g; a whitened W takes
    out of g_j z_j its regression on z_j too. Higher orders in d / m come on top.
    """
    z = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5

    def mean(values: Tensor) -> float:
        return float(torch.trapezoid(values * density, z))

    plain = activation(name)(scale * z)  # type: ignore[arg-type]
    signal = abs(mean(plain * (z**2 - 1)))
    if signal < 1e-6 * mean(plain.square()) ** 0.5:
        return None
    reduced = plain - mean(plain) - mean(plain * z) * z
    whitened = reduced - mean(reduced * z**2)
    forms = {"plain": plain, "reduced": reduced, "whitened": whitened}
    return {form: mean((g * z) ** 2) ** 0.5 / signal for form, g in forms.items()}


def theory() -> None:
    """One JSON line for each activation and scale, and for the conditions of Theorem B.1."""
    wanted = math.tan(math.asin(REPORTED[1]))
    for name, scale in itertools.product(("relu", "leaky_relu", "elu", "gelu", "softplus"), SCALES):
        ratios = leading_ratios(name, scale)
        assert ratios is not None
        for form, ratio in ratios.items():
            row = {"activation": name, "std_times_norm": scale, "form": form}
            error = math.sin(math.atan(ratio * math.sqrt((DIMENSION - 1) / 14336)))
            row |= {"error_at_14336": round(error, 3)}
            row |= {"neurons_for_the_paper": round((DIMENSION - 1) * (ratio / wanted) ** 2)}
            print(json.dumps(row))
    curvature = 1 / math.sqrt(2 * math.pi)  # E[σ''] of ReLU
    for count in REPORTED:
        needed = CLASSES**2 * count**2 * DIMENSION / curvature**2
        bound = CLASSES / curvature * count * math.sqrt(DIMENSION / 14336)
        row = {"batch": count, "neurons_of_theorem_b1": round(needed)}
        row |= {"its_bound_at_14336": round(bound, 1)}
        row |= {"K2_B4": CLASSES**2 * count**4, "d": DIMENSION}
        print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("theory", "designs", "measure"))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=["plain", "improved"])
    parser.add_argument("--planted", type=int, nargs="+", default=[14336], help="neurons, m")
    parser.add_argument("--alike", type=float, nargs="+", default=[0.0], help="pairwise cosine")
    parser.add_argument("--std", type=float, nargs="+", default=[1.0], help="of the entries of W")
    parser.add_argument("--norm", type=float, nargs="+", default=[1.0], help="of the features")
    parser.add_argument("--activation", nargs="+", default=["relu"])
    parser.add_argument("--rows", nargs="+", default=["graded"], help="rows of A")
    parser.add_argument("--distinct", action="store_true", help="no label twice in a batch")
    arguments = parser.parse_args()
    if arguments.what == "theory":
        theory()
    elif arguments.what == "designs":
        for neurons in arguments.planted:
            designs(arguments.draws, neurons)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
