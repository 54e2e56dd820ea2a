"""Speed and accuracy of the privacy calculator's formulas, on one core.

`speed`: processor seconds for 10^5 evaluations of each closed form, and for one evaluation of a
pair of 50-dimensional normal distributions. `accuracy`: the largest error against mpmath over
random points of the whole domain (ε in [0, 10], leverage in [1e-10, 1), r in [1, 10^4]): relative
for δ down to 1e-300, relative for log δ below. Prints JSON lines.

    OMP_NUM_THREADS=1 python benchmarks/privacy.py speed [--repeats 5]
    OMP_NUM_THREADS=1 python benchmarks/privacy.py accuracy [--points 1000]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.privacy.mechanisms import least_squares, normal, projection
from fedsim.privacy.numerics import gaussian

MANY = 100_000
Arrays = dict[str, np.ndarray]


def domain(count: int, seed: int) -> Arrays:
    """Random points of the whole domain, half of them where δ is neither 1 nor tiny."""
    stream = np.random.default_rng(seed)
    p = np.where(
        stream.random(count) < 0.5,
        10 ** stream.uniform(-10, 0, count),
        1 / (1 + np.exp(-stream.normal(0, 3, count))),
    )
    r = np.floor(10 ** stream.uniform(0, 4, count))
    epsilon = np.where(stream.random(count) < 0.1, 0.0, stream.uniform(0, 10, count))
    near = np.minimum(10.0, stream.uniform(0, 30, count) * p * np.sqrt(r))
    epsilon = np.where(stream.random(count) < 0.5, near, epsilon)
    q = p + (1 - p) * stream.random(count) ** stream.integers(1, 9, count)
    d = np.floor(10 ** stream.uniform(0, 2, count))
    return {"p": p, "q": np.minimum(q, 1 - 1e-12), "r": r, "d": d, "epsilon": epsilon}


def fastest(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()  # not the clock's: others may use the machine
        work()
        seconds.append(time.process_time() - start)
    return {"median_s": sorted(seconds)[len(seconds) // 2], "least_s": min(seconds)}


def speed(repeats: int) -> list[dict[str, Any]]:
    """Seconds of each closed form over 10^5 points, and of one 50-dimensional pair."""
    at = domain(MANY, 0)
    p, q, r, d, epsilon = (at[name] for name in ("p", "q", "r", "d", "epsilon"))
    stream = np.random.default_rng(1)
    means = stream.normal(size=(2, 50)) / 7
    roots = stream.normal(size=(2, 50, 50)) / 7 + 2 * np.eye(50)
    pair = means[0], roots[0] @ roots[0].T, means[1], roots[1] @ roots[1].T
    work = {
        "gaussian": lambda: gaussian.log_delta(1 / (p * np.sqrt(r)), epsilon),
        "projection": lambda: projection.log_delta(p, r, epsilon),
        "projection, reverse": lambda: projection.log_delta(p, r, epsilon, "reverse"),
        "linear combination": lambda: projection.log_delta(p, 1, epsilon),
        "least squares": lambda: least_squares.log_delta(p, q, r, d, epsilon, "forward"),
        "least squares, reverse": lambda: least_squares.log_delta(p, q, r, d, epsilon, "reverse"),
        "max leverage, 10^3": lambda: projection.max_leverage(epsilon[:1000], 1e-5, r[:1000]),
    }
    rows = [{"what": what, "points": MANY, **fastest(do, repeats)} for what, do in work.items()]
    rows[-1]["points"] = 1000
    one = fastest(lambda: np.exp(normal.pair(*pair).log_delta(1.0)), repeats)
    return [*rows, {"what": "normal, 50 dimensions", "points": 1, **one}]


def accuracy(points: int) -> list[dict[str, Any]]:
    """The largest errors of the closed forms against their high-precision references."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import mpmath as mp
    import ndis_reference as reference

    at = domain(points, 2)
    rows = []
    for what in ("gaussian", "forward", "reverse"):
        worst = {"delta": 0.0, "log_delta": 0.0}
        counted = 0
        for p, r, epsilon in zip(at["p"], at["r"], at["epsilon"], strict=True):
            if what == "gaussian":
                multiplier = 1 / (p * math.sqrt(r))
                found = float(gaussian.log_delta(multiplier, epsilon))
                exact = reference.gaussian_difference(1 / multiplier, epsilon)
            else:
                found = float(projection.log_delta(p, r, epsilon, what))
                exact = reference.projection_difference(p, r, epsilon, what == "reverse")
            if exact == 0:
                continue
            counted += 1
            expected = mp.log(exact)
            if expected > -690:
                error = float(abs(mp.expm1(found - expected)))
                worst["delta"] = max(worst["delta"], error)
            else:
                error = float(abs(found / expected - 1))
                worst["log_delta"] = max(worst["log_delta"], error)
        rows.append({"what": what, "points": counted, "largest_relative_error": worst})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "accuracy"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--points", type=int, default=1000)
    chosen = parser.parse_args()
    rows = speed(chosen.repeats) if chosen.what == "speed" else accuracy(chosen.points)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
