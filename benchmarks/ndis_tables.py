"""Tables I to IV of the NDIS paper: what do the mechanisms cost, and what do tight forms save?

Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum and its
Application to Privacy-Preserving Machine Learning. ε = 1, δ = 1/n and r = ln(n) / 0.01 as in the
paper, on tables that scikit-learn carries and on synthetic ones of the paper's sizes: n rows of d
features on [-1, 1] and a linear target with as much noise as signal. l = sqrt(d + 1) throughout.
(For its Cancer table the paper takes r = 300 instead.)

`privacy` is `dp`, or `relative` to the database and all that differ from it by one of its rows
(Definition 6): its largest leverage and residual are then taken from the data, which is no
differential privacy. A sketch D'G depends on D by D'D alone, so it is drawn as LZ, LL' = D'D: the
same distribution at a fraction of the cost. PDR is the mean of |G'(u - v)| / (sqrt(r) |u - v|) over
pairs of columns, DPR the correlation of the columns' dot products before and after.

[17] (Showkatbakhsh, Karakus and Diggavi, ISIT 2018) releases the same noisy sketch; the noise that
the tables give it depends on the data in a way that the paper does not state, so here it is what
[17]'s notion of privacy, mutual information, asks for by our own bound.

A user who has the real tables names a YAML file with the keys of source `table` (docs/private-
releases.md) in place of a database: `--database cancer.yaml`.

Prints a JSON line per (database, privacy, mechanism) with means and 95% Student intervals.

    python benchmarks/ndis_tables.py [--trials 100] [--database NAME ...] [--without-least-squares]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from fedsim.contracts.guarantee import Release
from fedsim.data.bundled_tables import BreastCancer, Diabetes
from fedsim.data.table import TableFile
from fedsim.privacy.mechanisms import projection
from fedsim.privacy.numerics import gaussian
from fedsim.scoring import student_interval
from fedsim.types import Table
from fedsim_defenses.least_squares import LeastSquaresMechanism
from fedsim_defenses.random_projection import RandomProjection

Array = NDArray[np.float64]
EPSILON = 1.0
SYNTHETIC = {"cancer size": (2809, 12), "flight size": (327_346, 2), "song size": (515_345, 90)}
BUNDLED = {"breast_cancer": BreastCancer, "diabetes": Diabetes}
PROJECTIONS = {
    "RP tight": "tight",
    "RP paper": "paper",
    "[15]": "sheffet",
    "[17], by mutual information": "mutual_information",
}
_CHUNK = 50_000


@dataclass(frozen=True)
class Database:
    """What the mechanisms depend on, of (n, d + 1) rows [B, b]."""

    name: str
    rows: int
    norm: float
    gram: Array
    leverage: float
    """Largest leverage of a row in [B, b]."""
    of_features: float
    """Largest leverage of a row in B."""
    residual: float
    """Largest share of a row in the squared residuals."""
    reach: float
    """Farthest that the solution moves when a row is left out."""

    @property
    def columns(self) -> int:
        return math.floor(math.log(self.rows) / 0.01)

    @property
    def features(self) -> int:
        return len(self.gram) - 1


def summarized(name: str, parts: list[Array], norm: float) -> Database:
    gram = np.sum([part.T @ part for part in parts], axis=0)
    inverse, of_features = np.linalg.inv(gram), np.linalg.inv(gram[:-1, :-1])
    best, squared = solution(gram)
    most = np.zeros(4)
    for part in parts:
        whole = np.einsum("ij,jk,ik->i", part, inverse, part)
        p = np.einsum("ij,jk,ik->i", part[:, :-1], of_features, part[:, :-1])
        error = part[:, -1] - part[:, :-1] @ best
        # x without row i is x - (B'B)^-1 v e / (1 - p).
        moved = np.linalg.norm(part[:, :-1] @ of_features, axis=1) * np.abs(error) / (1 - p)
        found = [whole.max(), p.max(), (error**2).max() / squared, moved.max()]
        most = np.maximum(most, found)
    return Database(name, sum(map(len, parts)), norm, gram, *map(float, most))


def synthetic_parts(rows: int, features: int) -> Iterator[Array]:
    """The rows [B, b] of the synthetic table of that size, by and by."""
    rng = np.random.default_rng(rows)
    weights = rng.standard_normal(features)
    for start in range(0, rows, _CHUNK):
        shape = (min(_CHUNK, rows - start), features)
        x = np.clip(rng.standard_normal(shape) / 3, -1, 1)
        signal = x @ weights / np.linalg.norm(weights)
        y = np.clip((signal + rng.standard_normal(shape[0]) / 3) / 1.5, -1, 1)
        yield np.column_stack([x, y])


def of_table(name: str, table: Table) -> Database:
    rows = np.vstack([table.train_rows.numpy(), table.test_rows.numpy()])
    return summarized(name, [rows], table.row_norm)


def databases(wanted: list[str]) -> Iterator[Database]:
    for name in wanted:
        if name in SYNTHETIC:
            rows, features = SYNTHETIC[name]
            parts = list(synthetic_parts(rows, features))
            yield summarized(name, parts, math.sqrt(features + 1))
        elif name in BUNDLED:
            yield of_table(name, BUNDLED[name]().load())
        else:
            source = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
            yield of_table(Path(name).stem, TableFile.model_validate(source).load())


def solution(gram: Array) -> tuple[Array, float]:
    """(x, |e|²) of least squares, from [B, b]'[B, b]."""
    best = np.linalg.solve(gram[:-1, :-1], gram[:-1, -1])
    return best, float(gram[-1, -1] - gram[:-1, -1] @ best)


def smoothed(gram: Array, sigma: float) -> Array:
    return gram + sigma**2 * np.eye(len(gram))


def projected(base: Database, sigma: float, rng: np.random.Generator) -> dict[str, float]:
    """PDR, DPR and the regression's error of one noisy sketch."""
    factor = np.linalg.cholesky(smoothed(base.gram, sigma))
    gram = factor @ _wishart(len(base.gram), base.columns, rng) @ factor.T
    pairs = np.triu_indices(len(gram), 1)
    true, seen = (_distances(g)[pairs] for g in (base.gram, gram / base.columns))
    best, _ = solution(base.gram)
    error = np.linalg.norm(solution(gram)[0] - best) / np.linalg.norm(best)
    dots = np.triu_indices(len(gram))
    return {
        "pdr": float((seen / true).mean()),
        "dpr": float(np.corrcoef(base.gram[dots], gram[dots])[0, 1]),
        "error": float(error),
    }


def regressed(base: Database, sigma: float, rng: np.random.Generator) -> dict[str, float]:
    """The error of a draw of M_LS."""
    gram = smoothed(base.gram, sigma)
    mean, squared = solution(gram)
    draw = rng.standard_normal(base.features)
    spread = np.linalg.solve(np.linalg.cholesky(gram[:-1, :-1]).T, draw)
    found = mean + math.sqrt(squared / base.columns) * spread
    best, _ = solution(base.gram)
    return {"error": float(np.linalg.norm(found - best) / np.linalg.norm(best))}


def perturbed(base: Database, sigma: float, rng: np.random.Generator) -> dict[str, float]:
    """The error of the solution with noise on it."""
    best, _ = solution(base.gram)
    noise = sigma * rng.standard_normal(base.features)
    return {"error": float(np.linalg.norm(noise) / np.linalg.norm(best))}


def _wishart(size: int, columns: int, rng: np.random.Generator) -> Array:
    normal = rng.standard_normal((size, columns))
    return normal @ normal.T


def _distances(gram: Array) -> Array:
    lengths = np.diag(gram)
    return np.sqrt(np.maximum(lengths[:, None] + lengths[None, :] - 2 * gram, 0))


def report(base: Database, trials: int, least_squares: bool) -> Iterator[dict[str, object]]:
    delta, r, d = 1 / base.rows, base.columns, base.features
    sketch = Release(kind="sketch", row_norm=base.norm, columns=r, features=d)
    normal = Release(kind="normal_coefficients", row_norm=base.norm, columns=r, features=d)
    about = {"database": base.name, "n": base.rows, "d": d, "r": r, "epsilon": EPSILON}

    def row(
        privacy: str, mechanism: str, sigma: float, draw: object, **more: object
    ) -> dict[str, object]:
        assert callable(draw)
        rng = np.random.default_rng(0)
        drawn = [draw(base, sigma, rng) for _ in range(trials)]
        measured = {}
        for key in drawn[0]:
            values = [one[key] for one in drawn]
            low, high = student_interval(values)
            measured[key] = {"mean": float(np.mean(values)), "low": low, "high": high}
        common = {**about, "delta": delta, "privacy": privacy, "mechanism": mechanism}
        return {**common, "sigma": sigma, **more, "trials": trials, **measured}

    for privacy, leverage in (("dp", 1.0), ("relative", base.leverage)):
        settings = {"epsilon": EPSILON, "delta": delta, "leverage": leverage}
        for name, calibration in PROJECTIONS.items():
            noise = RandomProjection.model_validate({**settings, "calibration": calibration})
            yield row(privacy, name, noise.sigma(sketch), projected)
        for calibration in ("tight", "paper") if least_squares else ():
            mechanism = LeastSquaresMechanism.model_validate(
                {**settings, "calibration": calibration}
            )
            yield row(privacy, f"LS {calibration}", mechanism.sigma(normal), regressed)
    inherent = float(projection.log_delta(base.leverage, r, EPSILON)) / math.log(10)
    yield row("relative", "RP without noise", 0.0, projected, inherent_log10_delta=inherent)
    if least_squares:
        p, q = base.of_features, min(1.0, base.of_features + base.residual)
        worst = float(least_squares.log_delta(p, q, r, d, EPSILON)) / math.log(10)
        yield row("relative", "LS without noise", 0.0, regressed, inherent_log10_delta=worst)
    multiplier = float(gaussian.noise_multiplier(EPSILON, delta))
    yield row("relative", "Gaussian on OLS", base.reach * multiplier, perturbed)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--database", nargs="+", default=[*BUNDLED, *SYNTHETIC])
    parser.add_argument("--without-least-squares", action="store_true")
    chosen = parser.parse_args()
    for base in databases(chosen.database):
        for line in report(base, chosen.trials, not chosen.without_least_squares):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
