"""The privacy calculator: every mechanism in Python and on the command line, and refusals."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedsim.cli import app
from fedsim.privacy import calculator, kernel_distance
from fedsim.privacy.contract import Answer, Calibration, Curve
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from click.testing import Result

NORMAL = {
    "mean1": [0, 0],
    "cov1": [[1, 0], [0, 2]],
    "mean2": [1, 0],
    "cov2": [[1, 0.1], [0.1, 1]],
}
CURVES: dict[str, dict[str, Any]] = {
    "gaussian": {"sensitivity": 1, "sigma": 2},
    "random_projection": {"leverage": 0.1, "r": 20},
    "least_squares": {"p": 0.02, "q": 0.05, "r": 300, "d": 12},
    "normal": {},
    "gaussian_sampling": {"k": 100, "distance": 0.05},
    "truncated_laplace": {"sensitivity": 1, "scale": 1, "bound": 6},
}
NOISES: dict[str, dict[str, Any]] = {
    "gaussian": {"sensitivity": 2.5},
    "random_projection": {"row_norm": 1.5, "r": 20},
    "truncated_laplace": {"sensitivity": 2},
    "gaussian_sampling": {"distance": 0.01},
}


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["privacy", *(str(word) for word in words)])


@pytest.fixture
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The keys of the curve that the test is about."""
    name = request.getfixturevalue("name")
    if name != "normal":
        return CURVES[name]
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(NORMAL), encoding="utf-8")
    return {"file": str(path)}


def test_gaussian_sampling_of_a_lifted_kernel_is_known_better_than_by_its_distance() -> None:
    keys = {"beta": 0.05, "lift": 3.0, "gain": 2.0, "row_norm": 0.7}
    distance = kernel_distance.lifted(0.05, 3.0, gain=2.0, row_norm=0.7)
    known = calculator.epsilon("gaussian_sampling", {"k": 50, **keys}, delta=1e-3)
    apart = calculator.epsilon("gaussian_sampling", {"k": 50, "distance": distance}, delta=1e-3)
    assert 0.5 * apart.epsilon < known.epsilon < 0.97 * apart.epsilon
    assert "proven" in known.method
    assert calculator.delta(
        "gaussian_sampling", {"k": 50, **keys}, epsilon=known.epsilon
    ).delta == pytest.approx(1e-3)
    draws = calculator.calibrate("gaussian_sampling", keys, epsilon=known.epsilon, delta=1e-3).draws
    assert draws is not None
    assert abs(draws - 50) <= 1
    paper = {"k": 50, "variant": "paper"}
    assert (
        calculator.epsilon("gaussian_sampling", {**paper, **keys}, delta=1e-3).epsilon
        == calculator.epsilon(
            "gaussian_sampling", {**paper, "distance": distance}, delta=1e-3
        ).epsilon
    )


@pytest.mark.parametrize("name", CURVES)
def test_delta_and_epsilon_are_inverse_and_the_curve_agrees(
    name: str, keys: dict[str, Any]
) -> None:
    asked = 0.4
    there = calculator.delta(name, keys, epsilon=asked)
    assert there.epsilon == asked
    assert there.delta == pytest.approx(math.exp(there.log_delta))
    assert 0 < there.delta < 1
    back = calculator.epsilon(name, keys, delta=there.delta)
    assert back.epsilon == pytest.approx(asked, rel=1e-8)
    curve = calculator.curve(name, keys)
    assert isinstance(curve, Curve)
    lines = curve.log_deltas(np.array([0.0, asked]))
    assert max(values[1] for values in lines.values()) == pytest.approx(there.log_delta, rel=1e-9)


@pytest.mark.parametrize("name", NOISES)
def test_the_noise_is_private_and_less_is_not(name: str) -> None:
    found = calculator.calibrate(name, NOISES[name], epsilon=1.0, delta=1e-4)

    def log_delta(factor: float) -> float:
        given = NOISES[name]
        if name == "gaussian":
            keys = {**given, "sigma": (found.sigma or 0) * factor}
        elif name == "random_projection":
            sigma = (found.sigma or 0) * factor
            keys = {"leverage": 1.5**2 / (1.5**2 + sigma**2), "r": 20}
        elif name == "truncated_laplace":
            keys = {**given, "scale": found.scale, "bound": (found.bound or 0) * factor}
        else:
            keys = {**given, "k": round((found.draws or 0) / factor + (factor < 1))}
        return calculator.delta(name, keys, epsilon=1.0).log_delta

    assert log_delta(1.0) <= math.log(1e-4) + 1e-8
    assert log_delta(0.99) > math.log(1e-4)


@pytest.mark.parametrize("name", CURVES)
def test_the_command_says_what_python_says(name: str, keys: dict[str, Any]) -> None:
    words = [f"{key}={value}" for key, value in keys.items()]
    result = invoke("delta", name, *words, "--epsilon", 0.4, "--json")
    assert result.exit_code == 0, result.output
    read = json.loads(result.output)
    assert list(read) == [field.name for field in fields(Answer)]
    expected = calculator.delta(name, keys, epsilon=0.4)
    assert read["delta"] == expected.delta
    assert read["log_delta"] == expected.log_delta
    assert read["interval"] is None
    shown = invoke("epsilon", name, *words, "--delta", 0.01)
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].split()[0] == "epsilon"
    assert "None" not in shown.output


def test_what_is_infinite_is_still_strict_json() -> None:
    result = invoke("epsilon", "gaussian", "sensitivity=1", "sigma=0", "--delta", 0.1, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output, parse_constant=pytest.fail)["epsilon"] == "inf"


def test_an_estimate_comes_with_its_interval(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(NORMAL), encoding="utf-8")
    keys = {"file": path, "method": "monte_carlo", "error": 0.01}
    found = calculator.delta("normal", keys, epsilon=0.5)
    exact = calculator.delta("normal", {"file": path}, epsilon=0.5)
    assert found.interval is not None
    assert found.interval[0] <= exact.delta <= found.interval[1]
    assert found.confidence == 0.99
    with pytest.raises(FedsimError, match="method: monte_carlo estimates"):
        calculator.epsilon("normal", keys, delta=0.1)


@pytest.mark.parametrize("words", [[], ["delta"], ["epsilon"], ["calibrate"]])
def test_without_a_mechanism_it_lists_them(words: list[str]) -> None:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    for name in calculator.MECHANISMS:
        assert name in result.output
    assert "> 0" in result.output
    assert "units of the release" in result.output
    rows = json.loads(invoke(*words, "--json").output)
    assert {row["mechanism"] for row in rows} == set(calculator.MECHANISMS)


@pytest.mark.parametrize("name", ["random_projection", "gaussian_sampling"])
def test_the_plot_is_a_picture_of_both_directions(name: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    words = [f"{key}={value}" for key, value in CURVES[name].items()]
    result = invoke("delta", name, *words, "--epsilon", 0.4, "--plot", path)
    assert result.exit_code == 0, result.output
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert min(width, height) >= 400


REFUSED = [
    ("delta gausian sensitivity=1 --epsilon 1", "did you mean 'gaussian'"),
    ("delta gaussian sensitivty=1 sigma=2 --epsilon 1", "did you mean 'sensitivity'"),
    ("delta gaussian sigma=2 --epsilon 1", "sensitivity: missing; add sensitivity="),
    ("delta gaussian sensitivity=1 sigma=2", "--epsilon is missing"),
    ("epsilon gaussian sensitivity=1 sigma=2", "--delta is missing"),
    ("calibrate gaussian sensitivity=1 --epsilon 1", "--delta is missing"),
    ("delta gaussian sensitivity=1 sigma=nan --epsilon 1", "sigma: expected a finite number"),
    ("delta gaussian sensitivity=1 sigma=-2 --epsilon 1", "sigma: expected >= 0, got -2"),
    ("delta gaussian sensitivity=0 sigma=2 --epsilon 1", "sensitivity: expected > 0"),
    ("delta gaussian sensitivity=much sigma=2 --epsilon 1", "expected a number, got 'much'"),
    ("delta gaussian sensitivity --epsilon 1", "is not key=value"),
    ("delta gaussian sigma=1 sigma=2 --epsilon 1", "sigma: given twice"),
    ("delta gaussian sensitivity=1 sigma=2 --epsilon nan", "epsilon: got nan"),
    ("delta gaussian sensitivity=1 sigma=2 --epsilon -1", "epsilon: got -1"),
    ("delta gaussian sensitivity=1 sigma=2 --epsilon inf", "epsilon: got inf"),
    ("epsilon gaussian sensitivity=1 sigma=2 --delta 1", "delta: got 1"),
    ("epsilon gaussian sensitivity=1 sigma=2 --delta 0", "delta: got 0"),
    ("delta random_projection leverage=1.5 r=20 --epsilon 1", "leverage: expected <= 1"),
    ("delta random_projection leverage=0.5 r=1.5 --epsilon 1", "r: expected a whole number"),
    ("delta least_squares p=0.5 q=0.2 r=9 d=2 --epsilon 1", "more than q"),
    ("calibrate normal file=x --epsilon 1 --delta 0.1", "normal has no calibration"),
    ("delta normal file=/no/such.json --epsilon 1", "cannot be read"),
    ("calibrate truncated_laplace sensitivity=1 --epsilon 0 --delta 0.1", "epsilon: got 0"),
    ("calibrate gaussian_sampling distance=2 --epsilon 1 --delta 0.1", "not even one draw"),
    ("epsilon gaussian_sampling k=5 --delta 0.1", "takes distance, or else both beta and lift"),
    ("epsilon gaussian_sampling k=5 beta=1 --delta 0.1", "or else both beta and lift"),
    ("delta gaussian sensitivity=1 sigma=2 --epsilon 1 --plot curve.svg", "does not end in .png"),
]


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_bad_input_is_refused_with_its_cause(line: str, said: str) -> None:
    result = invoke(*line.split())
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"mean1": [0', "is not JSON"),
        ("[]", "holds no object"),
        (json.dumps({**NORMAL, "mean3": [0]}), "unknown keys: mean3"),
        (json.dumps({"mean1": [0]}), "lacks cov1, mean2, cov2"),
        (json.dumps({**NORMAL, "cov1": [[1, 0.5], [0, 1]]}), "not symmetric"),
        (json.dumps({**NORMAL, "cov1": [[1, 2], [2, 1]]}), "not a covariance"),
        (json.dumps({**NORMAL, "mean2": [0, 0, 0]}), "mean2: has 3 dimensions"),
        (json.dumps({**NORMAL, "mean2": [0, math.nan]}), "not finite"),
        ("\x00\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_cause(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(content, encoding="latin-1")
    result = invoke("delta", "normal", f"file={path}", "--epsilon", 1)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


def test_every_part_of_the_table_can_be_loaded() -> None:
    for name, known in calculator.MECHANISMS.items():
        for part, base in (("curve", Curve), ("calibration", Calibration)):
            if getattr(known, part):
                cls = calculator.load(name, part)
                assert issubclass(cls, base)
                assert all(field.description for field in cls.model_fields.values())
