"""Every installed defense keeps to its kind's contract: they are found by their entry points.

One that has to be told a parameter has its lines in `CASES`.
"""

from __future__ import annotations

from typing import Any

from fedsim.contracts.defense import (
    AggregationDefense,
    DataDefense,
    ModelDefense,
    StatisticDefense,
    TrainingDefense,
    UpdateDefense,
)
from fedsim.contracts.guarantee import Release
from fedsim.contracts.plugins import load_as, names
from fedsim.testing import (
    AggregationDefenseContract,
    DataDefenseContract,
    ModelDefenseContract,
    StatisticDefenseContract,
    TrainingDefenseContract,
    UpdateDefenseContract,
)

CONTRACTS: dict[type, type] = {
    UpdateDefense: UpdateDefenseContract,
    ModelDefense: ModelDefenseContract,
    TrainingDefense: TrainingDefenseContract,
    AggregationDefense: AggregationDefenseContract,
    DataDefense: DataDefenseContract,
    StatisticDefense: StatisticDefenseContract,
}

CASES: dict[str, list[dict[str, Any]]] = {
    "ats": [{}, {"policies": [[{"name": "contrast", "magnitude": 3}]]}],
    "censor": [{}, {"trials": 3, "falls_back": True}],
    "clip": [{"norm": 0.7}],
    "correlated_noise": [{"norm": 0.8, "noise_multiplier": 1.1, "correlation": 0.6}],
    "dp_ftrl": [{"noise_multiplier": 1.1, "correlation": 0.5}],
    "dp_sgd": [{"norm": 0.5, "noise_multiplier": 1.3}],
    "dropout": [{"rate": 0.5}],
    "exclude_vars": [{"exclude_vars": ["a"]}, {"exclude_vars": "b$"}],
    "gaussian_noise": [{"std": 0.3}, {"multiplier": 1.1}, {"epsilon": 2.0, "delta": 1e-5}],
    "gaussian_sampling": [
        {"beta": 0.01, "lift": 0.1, "epsilon": 1.0, "delta": 1e-3},
        {"beta": 1e-4, "least_eigenvalue": 0.01, "samples": 20},
    ],
    "gradient_pruning": [{"ratio": 0.7}, {"ratio": 0.5, "scope": "tensor"}],
    "instahide": [{}, {"images": 1}],
    "least_squares": [{"epsilon": 1.0, "delta": 1e-3}],
    "local_aggregation": [{"steps": 4, "batches": "same"}],
    "local_dp_mod": [{"clipping_norm": 0.7, "sensitivity": 0.2, "epsilon": 3.0, "delta": 1e-4}],
    "oasis": [{}, {"rotations": [30.0], "shears": [], "flips": True}],
    "percentile_privacy": [{"gamma": 20.0}, {"percentile": 40.0, "gamma": 0.5, "steps": 3}],
    "precode": [{"size": 8, "weight": 0.1}],
    "quantization": [{"bits": 3}, {"bits": 8, "rounding": "deterministic"}],
    "random_projection": [{"epsilon": 1.0, "delta": 1e-3}],
    "secure_aggregation": [
        {"range": 1e3, "buffer_range": 1e3},
        {
            "range": 1e3,
            "buffer_range": 1e3,
            "noise_multiplier": 2.0,
            "threshold": 0.8,
            "colluding": 0.2,
        },
    ],
    "soteria": [{"ratio": 0.5}],
    "svt_privacy": [
        {"fraction": 0.6, "gamma": 0.5},
        {"fraction": 0.6, "replace": False, "epsilon_release": 1e3, "steps": 2},
    ],
    "top_k": [{"ratio": 0.2}],
    "truncated_laplace": [
        {"beta": 0.1, "epsilon": 1.0, "delta": 1e-3},
        {"beta": 0.1, "epsilon": 1.0, "delta": 1e-3, "calibration": "paper"},
    ],
}

RELEASES = {
    "least_squares": Release(kind="sketched_coefficients", row_norm=1.5, columns=30, features=2),
    "random_projection": Release(kind="sketch", row_norm=1.5, columns=40, features=4),
}
"""What a `DataDefense` protects."""


def _suite(name: str, parameters: dict[str, Any], number: int) -> type:
    cls = load_as("fedsim.defenses", name, tuple(CONTRACTS))
    (contract,) = (suite for kind, suite in CONTRACTS.items() if issubclass(cls, kind))
    members: dict[str, Any] = {"make": lambda self: cls(**parameters)}
    if name in RELEASES:
        members["release"] = lambda self: RELEASES[name]
    return type(f"Test{cls.__name__}{number or ''}", (contract,), members)


for _name in names("fedsim.defenses"):
    for _number, _parameters in enumerate(CASES.get(_name, [{}])):
        _made = _suite(_name, _parameters, _number)
        globals()[_made.__name__] = _made  # where pytest looks for it
