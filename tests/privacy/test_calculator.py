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
from slow_cases import slow_but
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.contracts import plugins
from fedsim.privacy import calculator
from fedsim.privacy.contract import Answer, Calibration, Curve, Experiment, KnownMechanism, Stated
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from click.testing import Result

NAMES = plugins.names(calculator.GROUP)
NORMAL = {"mean1": [0, 0], "cov1": [[1, 0], [0, 2]], "mean2": [1, 0], "cov2": [[1, 0.1], [0.1, 1]]}
CURVES: dict[str, dict[str, Any]] = {
    "gaussian": {"sensitivity": 1, "sigma": 2},
    "dp_sgd": {"examples": 300, "batch_size": 30, "rounds": 4, "noise_multiplier": 2},
    "random_projection": {"leverage": 0.1, "r": 20},
    "least_squares": {"p": 0.02, "q": 0.05, "r": 300, "d": 12},
    "normal": {},
    "gaussian_sampling": {"k": 100, "distance": 0.05},
    "truncated_laplace": {"sensitivity": 1, "scale": 1, "bound": 6},
}
NOISES: dict[str, dict[str, Any]] = {
    "gaussian": {"sensitivity": 2.5},
    "dp_sgd": {"examples": 300, "batch_size": 30, "rounds": 4},
    "random_projection": {"row_norm": 1.5, "r": 20},
    "truncated_laplace": {"sensitivity": 2},
    "gaussian_sampling": {"distance": 0.01},
}


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["privacy", *(str(word) for word in words)])


def test_every_mechanism_is_tried_and_stands_in_the_page() -> None:
    """`correlated_gaussian` and the calibration of `least_squares` have files of their own."""
    loaded = {name: plugins.load(calculator.GROUP, name) for name in NAMES}
    curves = {name for name, mechanism in loaded.items() if mechanism.curve}
    noises = {name for name, mechanism in loaded.items() if mechanism.calibration}
    assert sorted(curves - CURVES.keys()) == ["correlated_gaussian"]
    assert sorted(noises - NOISES.keys()) == ["correlated_gaussian", "least_squares"]
    page = Path(__file__).parents[2] / "docs" / "privacy-calculator.md"
    table = page.read_text(encoding="utf-8").partition("## Mechanisms")[2]
    assert [name for name in NAMES if f"\n| `{name}` |" not in table] == []


@pytest.fixture
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The keys of the curve that the test is about."""
    name = request.getfixturevalue("name")
    if name != "normal":
        return CURVES[name]
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(NORMAL), encoding="utf-8")
    return {"file": str(path)}


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


@pytest.mark.parametrize("name", slow_but(NOISES.keys() - {"dp_sgd"}, NOISES.keys()))
def test_the_noise_is_private_and_less_is_not(name: str) -> None:
    found = calculator.calibrate(name, NOISES[name], epsilon=1.0, delta=1e-4)

    def log_delta(factor: float) -> float:
        given = NOISES[name]
        if name == "dp_sgd":
            keys = {**given, "noise_multiplier": (found.noise_multiplier or 0) * factor}
        elif name == "gaussian":
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
    assert expected.unit and expected.neighbours
    shown = invoke("epsilon", name, *words, "--delta", 0.01)
    assert shown.exit_code == 0, shown.output
    assert f"(δ 0.01, {expected.unit}, {expected.neighbours})" in shown.output


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
    with pytest.raises(FedsimError, match="confidence: got 1; expected a number in"):
        calculator.delta("normal", {**keys, "confidence": np.nextafter(1.0, 0.0)}, epsilon=0.5)


@pytest.mark.parametrize("words", [[], pytest.param(["delta"], marks=pytest.mark.slow)])
def test_without_a_mechanism_it_lists_them(words: list[str]) -> None:
    assert all(name in invoke(*words).output for name in NAMES)
    rows = json.loads(invoke(*words, "--json").output)
    assert {row["mechanism"] for row in rows} == set(NAMES)


def test_the_plot_is_a_picture_of_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    words = ["random_projection", "leverage=0.1", "r=20"]
    result = invoke("delta", *words, "--epsilon", 0.4, "--plot", path)
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
    ("audit gaussian sigma=2", "--delta is missing"),
    ("audit gaussian sigma=2 --delta 0.1 --draws 50", "too few"),
    ("audit gaussian sigma=2 --delta 0.1 --confidence 1", "confidence"),
    ("audit normal --delta 0.1", "has no experiment"),
    ("delta gaussian sensitivity=1 sigma=nan --epsilon 1", "sigma: expected a finite number"),
    ("delta gaussian sensitivity=much sigma=2 --epsilon 1", "expected a number, got 'much'"),
    ("delta gaussian sensitivity --epsilon 1", "is not key=value"),
    ("delta gaussian sigma=1 sigma=2 --epsilon 1", "sigma: given twice"),
    ("delta gaussian sensitivity=1 sigma=2 --epsilon nan", "epsilon: got nan"),
    ("epsilon gaussian sensitivity=1 sigma=2 --delta 1", "delta: got 1"),
    ("delta random_projection leverage=0.5 r=1.5 --epsilon 1", "r: expected a whole number"),
    ("calibrate normal file=x --epsilon 1 --delta 0.1", "normal has no calibration"),
    ("delta normal file=/no/such.json --epsilon 1", "cannot be read"),
    ("calibrate truncated_laplace sensitivity=1 --epsilon 0 --delta 0.1", "epsilon: got 0"),
    ("calibrate gaussian_sampling distance=2 --epsilon 1 --delta 0.1", "not even one draw"),
    ("epsilon gaussian_sampling k=5 beta=1 --delta 0.1", "or else both beta and lift"),
    ("delta gaussian sensitivity=1 sigma=2 --epsilon 1 --plot curve.svg", "does not end in .png"),
]


def test_every_part_of_a_registered_mechanism_is_of_its_kind_and_told() -> None:
    bases = {"curve": Curve, "calibration": Calibration, "experiment": Experiment}
    for row in calculator.listing():
        assert row["summary"] and row["keys"]
        for part in row["keys"]:
            cls = calculator.load(row["mechanism"], part)
            assert issubclass(cls, bases[part])
            if part != "experiment":
                assert cls.model_fields.keys() <= plugins.descriptions(cls).keys()


def test_curve_and_calibration_of_a_mechanism_protect_the_same() -> None:
    for name in NAMES:
        parts = plugins.load_as(calculator.GROUP, name, (KnownMechanism,)).parts().values()
        assert len({part.unit for part in parts if issubclass(part, Stated)}) <= 1, name


FEW = "--delta 1e-5 --draws 1000"
EXTREME = [
    ("audit least_squares r=20 d=3 --delta 1e-5 p=0.5 q=0.2", "p: got 0.5, more than q = 0.2"),
    (
        f"audit gaussian_sampling k=5 distance=0.1 sabotage=10 {FEW}",
        "no draw of k = 5; use at most 2.23",
    ),
    (
        f"calibrate least_squares row_norm=1 r=20 d={10**9} --epsilon 1 --delta 1e-5",
        "beyond what can be computed",
    ),
    (
        "calibrate least_squares row_norm=1 r=20 d=3 --epsilon 1e18 --delta 0.1",
        "epsilon: got 1e+18; expected at most 1e+06",
    ),
    (
        "calibrate truncated_laplace sensitivity=1 --epsilon 1 --delta 5e-324",
        "delta: 4.94066e-324 at epsilon 1 takes noise beyond what can be computed",
    ),
    ("epsilon gaussian sensitivity=1 sigma=1e-300 --delta 0.1", "sigma: expected 0 or >= 1e-12"),
    (
        "epsilon truncated_laplace sensitivity=1 scale=1e-12 bound=100 --delta 1e-5",
        "beyond what can be computed",
    ),
    (f"audit gaussian sigma=1 --delta 1e-5 --draws {10**26}", "use at most 100000000"),
    (f"delta random_projection leverage=0.1 r={'9' * 400} --epsilon 1", "r: expected <= 1"),
    (
        "audit correlated_gaussian steps=100000 sampling=full noise_multiplier=1 --delta 1e-5",
        "draws: 1000000 is too many to draw; use at most 4999",
    ),
    (
        "audit correlated_gaussian steps=100000 sampling=balls_in_bins sampling_rate=1e-5 "
        f"noise_multiplier=1 {FEW}",
        "patterns of participation are too many",
    ),
]


@pytest.mark.parametrize(("line", "said"), [*REFUSED, *EXTREME])
def test_what_is_refused_says_why(line: str, said: str, recwarn: pytest.WarningsRecorder) -> None:
    refuse(line, said)
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]


def refuse(line: str, said: str) -> None:
    result = invoke(*line.split())
    assert result.exit_code == 2, (result.output, result.exception)
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"mean1": [0', "is not JSON"),
        ("[]", "holds no object"),
        (json.dumps({**NORMAL, "mean3": [0]}), "unknown keys: mean3"),
        (json.dumps({"mean1": [0]}), "lacks cov1, mean2, cov2"),
        (json.dumps({**NORMAL, "mean1": [int("9" * 4000), 0]}), "mean1: holds a number beyond"),
        ("9" * 5000, "is not JSON"),
        ("\x00\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_cause(
    content: str, said: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "pair.json"
    path.write_text(content, encoding="latin-1")
    refuse(f"delta normal file={path} --epsilon 0.1", said)
    refuse(f"epsilon normal file={path} --delta 0.1", said)
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]


@pytest.mark.parametrize(("name", "value"), [("delta", math.nan), ("sigma", math.inf)])
def test_no_answer_is_printed_that_is_not_a_number(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.privacy.mechanisms.gaussian import _GaussianCurve

    told = {"epsilon": 1.0, "delta": 0.1, "log_delta": -1.0, "method": "", name: value}
    monkeypatch.setattr(_GaussianCurve, "delta", lambda *_: Answer(**told))
    result = invoke("delta", "gaussian", "sensitivity=1", "sigma=1", "--epsilon", 1)
    assert result.exit_code == 2, result.output
    assert f"{name} is not a finite number; use less extreme keys" in " ".join(
        result.output.split()
    )
