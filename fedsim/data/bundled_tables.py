"""Loads tables that scikit-learn carries, and draws synthetic ones."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field, field_validator

from fedsim.data.table import RangeColumn, TableSource, TargetColumn
from fedsim.types import Table

# Ranges are round numbers near the published ones: read from rows, they would void all claims.
_NUCLEUS: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    # mean, standard error and worst (mean of the three largest) over the nuclei of a sample
    "radius": ((5, 30), (0, 3), (5, 40)),
    "texture": ((5, 40), (0, 5), (10, 50)),
    "perimeter": ((40, 200), (0, 25), (50, 260)),
    "area": ((100, 2500), (0, 500), (150, 4500)),
    "smoothness": ((0.05, 0.17), (0, 0.04), (0.05, 0.25)),
    "compactness": ((0, 0.4), (0, 0.15), (0, 1.2)),
    "concavity": ((0, 0.5), (0, 0.4), (0, 1.5)),
    "concave points": ((0, 0.25), (0, 0.06), (0, 0.3)),
    "symmetry": ((0.1, 0.35), (0, 0.1), (0.1, 0.7)),
    "fractal dimension": ((0.04, 0.1), (0, 0.03), (0.05, 0.25)),
}
# scikit-learn orders the columns by statistic: ten means, then ten errors, then ten worst.
_CELLS = tuple(
    RangeColumn(name=name, low=low, high=high)
    for position, form in enumerate(("mean {}", "{} error", "worst {}"))
    for name, (low, high) in ((form.format(key), r[position]) for key, r in _NUCLEUS.items())
)

_PATIENTS = (
    RangeColumn(name="age", low=15, high=85),
    RangeColumn(name="sex", low=1, high=2),
    RangeColumn(name="bmi", low=15, high=45),
    RangeColumn(name="bp", low=60, high=140),
    RangeColumn(name="s1", low=90, high=310),
    RangeColumn(name="s2", low=40, high=250),
    RangeColumn(name="s3", low=20, high=100),
    RangeColumn(name="s4", low=1, high=10),
    RangeColumn(name="s5", low=3, high=6.5),
    RangeColumn(name="s6", low=50, high=130),
)
_PROGRESSION = RangeColumn(name="progression", low=0, high=400)


@final
class BreastCancer(TableSource):
    """569 breast masses, 30 features of their cell nuclei; malignant is -1, benign +1."""

    paper: ClassVar[str] = (
        "Breast Cancer Wisconsin (Diagnostic) (Wolberg, Street and Mangasarian, UCI, 1995), "
        "sklearn.datasets.load_breast_cancer"
    )

    features: tuple[str, ...] | None = None
    """Names of the features to use, such as `mean radius`. Default: all 30."""

    @field_validator("features")
    @classmethod
    def _check_features(cls, features: tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = [column.name for column in _CELLS]
        for name in features or ():
            if name not in names:
                raise ValueError(f"no feature is called {name!r}; expected some of {names}")
        if features is not None and (not features or len(set(features)) < len(features)):
            raise ValueError("name at least one feature, and none twice")
        return features

    def load(self) -> Table:
        """Returns 569 rows, `features` in scikit-learn's order; a fifth of them is to test on."""
        from sklearn.datasets import load_breast_cancer

        data = load_breast_cancer()
        indices = [
            i
            for i, column in enumerate(_CELLS)
            if self.features is None or column.name in self.features
        ]
        return self.table(
            "breast_cancer",
            torch.from_numpy(data.data).double()[:, indices],
            tuple(_CELLS[i] for i in indices),
            TargetColumn(
                "diagnosis",
                # scikit-learn codes malignant as 0 and benign as 1.
                torch.from_numpy(data.target).double() * 2 - 1,
                ("malignant", "benign"),
            ),
            private_statistics=(),
        )


@final
class Diabetes(TableSource):
    """442 patients, 10 features; the target is how far diabetes went on within a year."""

    paper: ClassVar[str] = (
        "Efron, Hastie, Johnstone and Tibshirani, Least Angle Regression, Annals of Statistics, "
        "2004; sklearn.datasets.load_diabetes"
    )

    def load(self) -> Table:
        """Returns the table of 442 rows and 10 features, a fifth of the rows to test on."""
        from sklearn.datasets import load_diabetes

        # The scaled table is centred by statistics of all patients: one row would move the others.
        data = load_diabetes(scaled=False)
        return self.table(
            "diabetes",
            torch.from_numpy(data.data).double(),
            _PATIENTS,
            TargetColumn(
                _PROGRESSION.name, _PROGRESSION.scale(torch.from_numpy(data.target).double())
            ),
            private_statistics=(),
        )


_SPREAD = 1 / 3
"""Standard deviation of a feature and of the noise on the target, before they are clamped."""


@final
class SyntheticTable(TableSource):
    """Normal features and a linear target with as much noise as signal, all clamped to [-1, 1].

    The draw is a function of the size and `draw` alone, so every run sees the same table.
    """

    paper: ClassVar[str] = ""

    rows: Annotated[int, Field(ge=10, le=10_000_000)]
    """n, the number of training and test rows together."""
    features: Annotated[int, Field(ge=1, le=10_000)]
    """d, the number of features without the intercept."""
    draw: Annotated[int, Field(ge=0)] = 0
    """Seed of the draw; each gives another table of that size."""

    def load(self) -> Table:
        """Draws the table of `rows` rows, a fifth of them to test on."""
        stream = torch.Generator().manual_seed(self.draw)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=stream, dtype=torch.float64)

        weights = normal(self.features)
        x = normal(self.rows, self.features) * _SPREAD
        noise = normal(self.rows) * _SPREAD
        # With weights of unit length the signal has the variance of a feature, that of the noise.
        target = x.clamp_(-1, 1) @ (weights / torch.linalg.vector_norm(weights)) + noise
        columns = tuple(RangeColumn(name=f"x{i}", low=-1, high=1) for i in range(self.features))
        return self.table(
            "synthetic_table",
            x,
            columns,
            TargetColumn("y", target.clamp(-1, 1)),
            private_statistics=(),
        )
