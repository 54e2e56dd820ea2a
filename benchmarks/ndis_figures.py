"""Figures 5, 6, 7, 9 and 10 of the NDIS paper, from the calculator and from draws.

Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum and its
Application to Privacy-Preserving Machine Learning. Databases are synthetic ones of the paper's
sizes (`ndis_tables.py`), and a bundled one; left out is the row of the largest leverage in [B, b].

*Figure 5.* The paper sets Theorem 4, which is ALS's limit for many columns r, beside estimates by a
trained classifier. ALS has a closed law at any r: given G'B its answer is normal around x with
covariance |e|² (B'GG'B)^-1, and B'GG'B is a Wishart matrix of r degrees of freedom. So it is a
multivariate t of r - d + 1 degrees around x with the shape |e|² (B'B)^-1 / (r - d + 1), since e is
orthogonal to B. The estimate is the mean of (1 - exp(ε - L))+ over draws, L being the exact
log-likelihood ratio: unbiased, where a classifier only bounds from below.

*Figure 9.* D'g of raw rows, without and with noise, against Theorem 7.

    python benchmarks/ndis_figures.py [--draws 200000] > docs/results/ndis-figures.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from ndis_tables import Array, synthetic_parts
from scipy.stats import beta, multivariate_t

from fedsim.data.bundled_tables import Diabetes
from fedsim.privacy.mechanisms import least_squares, projection
from fedsim.privacy.numerics import gaussian

EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0)
Row = dict[str, object]


@dataclass(frozen=True)
class Pair:
    """A database [B, b] by its Gram matrix, and the row that a neighbour lacks."""

    gram: Array
    row: Array

    def without(self) -> Array:
        """The neighbour's Gram matrix."""
        return np.asarray(self.gram - np.outer(self.row, self.row))

    @property
    def leverages(self) -> tuple[float, float]:
        """(p, q): of the row in B and in [B, b]."""
        features = self.row[:-1]
        p = float(features @ np.linalg.solve(self.gram[:-1, :-1], features))
        return p, float(self.row @ np.linalg.solve(self.gram, self.row))


def largest(parts: Iterable[Array]) -> Pair:
    """The database of these rows, and its row of the largest leverage."""
    parts = list(parts)
    gram = np.sum([part.T @ part for part in parts], axis=0)
    inverse = np.linalg.inv(gram)
    best = [part[np.einsum("ij,jk,ik->i", part, inverse, part).argmax()] for part in parts]
    top = max(best, key=lambda row: float(row @ inverse @ row))
    return Pair(gram, top)


def als_law(gram: Array, columns: int) -> multivariate_t:
    """ALS's exact law on `columns` rows of a sketch of [B, b] with that Gram matrix."""
    best = np.linalg.solve(gram[:-1, :-1], gram[:-1, -1])
    squared = float(gram[-1, -1] - gram[:-1, -1] @ best)
    freedom = columns - len(best) + 1
    shape = squared * np.linalg.inv(gram[:-1, :-1]) / freedom
    return multivariate_t(best, (shape + shape.T) / 2, df=freedom)


def estimated(losses: Array, epsilon: float) -> tuple[float, float, float]:
    """(δ, low, high) at 95% from log-likelihood ratios drawn under the first of the two."""
    values = np.maximum(-np.expm1(epsilon - losses), 0.0)
    mean, half = float(values.mean()), 1.96 * float(values.std()) / math.sqrt(len(values))
    hits = int((values > 0).sum())
    if hits < 50:
        # Too few draws for a normal interval; no value is above 1, so that δ is at most the chance
        # of a hit.
        return mean, 0.0, float(beta.ppf(0.975, hits + 1, len(values) - hits))
    return mean, max(mean - half, 0.0), mean + half


def worse(losses: dict[str, Array], epsilon: float) -> tuple[float, float, float]:
    """`estimated` of the direction with the larger δ."""
    return max(estimated(values, epsilon) for values in losses.values())


def figure_5(draws: int) -> Iterator[Row]:
    """ALS against its normal limit."""
    rng = np.random.default_rng(5)
    table = Diabetes().load()
    diabetes = np.vstack([table.train_rows.numpy(), table.test_rows.numpy()])
    for name, parts, columns in (
        ("diabetes (bundled)", [diabetes], math.floor(math.log(len(diabetes)) / 0.01)),
        ("cancer size", synthetic_parts(2809, 12), 300),
        ("flight, 20,000 rows", synthetic_parts(20_000, 2), math.floor(math.log(20_000) / 0.01)),
    ):
        pair = largest(parts)
        features = len(pair.row) - 1
        here, there = als_law(pair.gram, columns), als_law(pair.without(), columns)
        losses = {}
        for way, (one, two) in {"forward": (here, there), "reverse": (there, here)}.items():
            drawn = np.atleast_2d(one.rvs(draws, random_state=rng))
            losses[way] = np.asarray(one.logpdf(drawn) - two.logpdf(drawn))
        p, q = pair.leverages
        for epsilon in EPSILONS:
            limit = float(least_squares.log_delta(p, q, columns, features, epsilon))
            yield row("5", name, epsilon, limit, worse(losses, epsilon), p=p, q=q, r=columns)


def figures_6_and_10() -> Iterator[Row]:
    """Random projections (6) and linear combinations (10) without noise, of the worst row."""
    for name, rows, features in (("flight", 327_346, 2), ("song", 515_345, 90)):
        _, q = largest(synthetic_parts(rows, features)).leverages
        for figure, columns in (("6", math.floor(math.log(rows) / 0.01)), ("10", 1)):
            for epsilon in EPSILONS:
                log_delta = float(projection.log_delta(q, columns, epsilon))
                yield row(figure, f"{name} size", epsilon, log_delta, q=q, r=columns)


def figure_7(delta: float = 1e-5) -> Iterator[Row]:
    """The classical Gaussian mechanism: δ that it has, and the noise needed over its own."""
    for epsilon in (0.1, 0.2, 0.5, 1.0):
        sigma = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
        found = float(gaussian.log_delta(sigma, epsilon))
        needed = float(gaussian.noise_multiplier(epsilon, delta)) / sigma
        yield row("7", "δ claimed 1e-5", epsilon, found) | {"noise_over_claimed": f"{needed:.3f}"}


def figure_9(draws: int) -> Iterator[Row]:
    """Draws of D'g of raw rows against the closed form, without noise and with σ I below."""
    rng = np.random.default_rng(9)
    rows = np.clip(rng.standard_normal((30, 3)) / 3, -1, 1)
    for name, sigma in (("30 rows", 0.0), ("30 rows, σ = 1", 1.0)):
        gram = rows.T @ rows + sigma**2 * np.eye(3)
        leverages = np.einsum("ij,jk,ik->i", rows, np.linalg.inv(gram), rows)
        left = rows[leverages.argmax()]
        p = float(leverages.max())
        kept = gram - np.outer(left, left)
        losses = {}
        for way, (one, two) in {"forward": (gram, kept), "reverse": (kept, gram)}.items():
            inside = rows if way == "forward" else np.delete(rows, leverages.argmax(), axis=0)
            seen = rng.standard_normal((draws, len(inside))) @ inside
            seen += sigma * rng.standard_normal((draws, 3))
            squares = [np.einsum("ni,ij,nj->n", seen, np.linalg.inv(g), seen) for g in (one, two)]
            dets = np.linalg.slogdet(two)[1] - np.linalg.slogdet(one)[1]
            losses[way] = (squares[1] - squares[0] + dets) / 2
        for epsilon in EPSILONS:
            theory = float(projection.log_delta(p, 1, epsilon))
            yield row("9", name, epsilon, theory, worse(losses, epsilon), q=p, r=1)


def row(
    figure: str,
    database: str,
    epsilon: float,
    log_delta: float,
    found: tuple[float, float, float] | None = None,
    **keys: float,
) -> Row:
    """A line of the file; δ may underflow, so that its logarithm to base 10 is written."""
    line: Row = {"figure": figure, "database": database, "epsilon": epsilon}
    line |= {name: f"{keys[name]:.4g}" if name in keys else "" for name in ("p", "q", "r")}
    line["log10_delta"] = f"{log_delta / math.log(10):.3f}"
    line["delta"] = f"{math.exp(log_delta):.5g}"
    for name, value in zip(("estimate", "low", "high"), found or (None,) * 3, strict=True):
        line[name] = "" if value is None else f"{value:.5g}"
    return line | {"noise_over_claimed": ""}


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=200_000)
    draws = parser.parse_args().draws
    lines = [*figure_5(draws), *figures_6_and_10(), *figure_7(), *figure_9(draws)]
    writer = csv.DictWriter(sys.stdout, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


if __name__ == "__main__":
    main()
