"""Every mechanism's claim tried: as it is, and with 20% less noise than it claims.

The lower bound has to stay below the claim of what is honest, and above that of what lies. The
confidence is that of all honest verdicts together. Prints a table in Markdown.

    python benchmarks/audit.py [--draws 1000000] [--confidence 0.99] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from fedsim.audit.mechanisms import audit

CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("gaussian", 1e-5, {"sensitivity": 1.0, "sigma": 1.0}),
    ("gaussian", 1e-2, {"sensitivity": 1.0, "sigma": 4.0}),
    ("random_projection", 1e-3, {"leverage": 0.1, "r": 20}),
    ("random_projection", 1e-2, {"leverage": 0.02, "r": 300}),
    ("least_squares", 1e-3, {"p": 0.05, "q": 0.1, "r": 100, "d": 10}),
    ("truncated_laplace", 1e-2, {"sensitivity": 1.0, "scale": 1.0, "bound": 4.5}),
    ("gaussian_sampling", 1e-3, {"k": 100, "distance": 0.15}),
    ("gaussian_sampling", 1e-3, {"k": 100, "beta": 0.05, "lift": 1.0}),
    ("poisson_gaussian", 1e-3, {"steps": 20, "sampling_rate": 0.1, "noise_multiplier": 1.0}),
    ("correlated_gaussian", 1e-3, {"steps": 20, "correlation": 0.7, "sampling": "full",
                                   "noise_multiplier": 10.0}),
    ("correlated_gaussian", 1e-3, {"steps": 20, "correlation": 0.7, "sampling": "single_epoch",
                                   "noise_multiplier": 1.0}),
    ("correlated_gaussian", 1e-3, {"steps": 5, "sampling_rate": 0.25, "correlation": 0.5,
                                   "sampling": "balls_in_bins", "noise_multiplier": 1.5}),
    ("correlated_gaussian", 1e-3, {"steps": 5, "sampling_rate": 0.25, "correlation": 0.5,
                                   "sampling": "poisson", "noise_multiplier": 1.5}),
    ("correlated_gaussian", 1e-3, {"steps": 5, "sampling_rate": 0.25, "correlation": 0.5,
                                   "sampling": "fixed_size", "noise_multiplier": 1.5}),
]  # fmt: skip
LYING = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1_000_000, help="of each of the two worlds")
    parser.add_argument("--confidence", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    confidence = 1 - (1 - asked.confidence) / len(CASES)
    rows = []
    print("| mechanism | δ | ε claimed | lower bound | with 20% less noise | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, delta, keys in CASES:
        started = time.perf_counter()
        honest, lying = (
            audit(
                name,
                {**keys, "sabotage": sabotage},
                delta=delta,
                draws=asked.draws,
                confidence=confidence,
                seed=asked.seed,
            )
            for sabotage in (1.0, LYING)
        )
        seconds = time.perf_counter() - started
        said = " ".join(f"{key}={value}" for key, value in keys.items())
        caught = "caught" if not lying.holds else "not caught"
        print(
            f"| {name} {said} | {delta:g} | {honest.claim:.4f} | {honest.lower_bound:.4f} "
            f"({honest.text.partition(':')[0]}) | {lying.lower_bound:.4f} ({caught}) "
            f"| {seconds:.1f} |",
            flush=True,
        )
        rows.append(
            {
                "mechanism": name,
                "keys": keys,
                "delta": delta,
                "claim": honest.claim,
                "lower_bound": honest.lower_bound,
                "bounds": dict(honest.bounds),
                "holds": honest.holds,
                "sabotaged_lower_bound": lying.lower_bound,
                "caught": not lying.holds,
            }
        )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
