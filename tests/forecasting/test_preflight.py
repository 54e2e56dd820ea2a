"""Forecasts of plans with a known answer, the laws that they keep, and what is refused."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fedsim
from fedsim.cli.commands import app
from fedsim.forecasting.forecast import Forecast, render
from fedsim.forecasting.gain import UpdateMap, _lanczos
from fedsim.forecasting.preflight import preflight_file
from fedsim.models import live
from fedsim.models.base import Classifier
from fedsim.types import FedsimError, LocalTraining

SHAPE, CLASSES = (1, 8, 8), 10
IMAGES, LABELS = torch.rand(4, *SHAPE), torch.zeros(4, dtype=torch.int64)
PRUNED = [{"name": "gradient_pruning", "ratio": 0.95}]
SCENARIO = """\
name: plan
data: {source: {name: digits, size: 8}, clients: 2}
model: {name: mlp, hidden: [16], activation: sigmoid}
training: {rounds: 1, local: {batch_size: 2}}
defenses:
  none: []
  noise: [{name: clip, norm: 1.0}, {name: gaussian_noise, multiplier: 10}]
attacks: [{name: label_inference}]
observe: {rounds: [1], batch_sizes: [1, 2], trials: 1}
"""


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, CLASSES, bias=True)
    )


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(6 * 64, CLASSES),
    )


def told(model: nn.Module, batch_size: int = 1, **more: Any) -> Forecast:
    return fedsim.preflight(
        model, input_shape=SHAPE, classes=CLASSES, batch_size=batch_size, **more
    )


def noise(std: float) -> list[dict[str, Any]]:
    return [{"name": "gaussian_noise", "std": std}]


def test_pruning_and_rounding_cost_gain() -> None:
    bare = told(smooth()).estimate.gain
    pruned = told(smooth(), defenses=PRUNED).estimate.gain
    rounded = told(smooth(), defenses=[{"name": "quantization", "bits": 3}]).estimate.gain
    assert pruned < bare and rounded < bare


@pytest.mark.slow
def test_neither_a_larger_batch_nor_more_clients_raise_the_gain() -> None:
    for model in (smooth(), normed()):
        gains = [told(model, size, mode="eval").estimate.gain for size in (1, 3, 4, 8)]
        assert all(after <= before for before, after in pairwise(gains))
    alone, many = (told(smooth(), 2, clients=clients).estimate.gain for clients in (1, 3))
    assert many <= alone


def test_no_gain_is_told_of_what_the_first_attack_does_other_than_match() -> None:
    """Matching gradients gains nothing here, which says nothing of features."""
    forecast = told(smooth(), defenses=PRUNED)
    assert forecast.first_attack == "factored_inversion" and forecast.estimate.gain < 0.5
    assert (forecast.gain, forecast.band, forecast.attackable) == (None, None, "not told")
    assert "recovers features first" in forecast.reason and forecast.reason in forecast.verdict
    row = forecast.as_row()
    assert row["gain"] is None and row["band"] is None and row["reason"] == forecast.reason
    text = render([told(smooth()), forecast])
    (line,) = [each for each in text.splitlines() if each.startswith("gradient_pruning")]
    assert line.split()[3:] == ["not", "told", "–", "factored_inversion"]
    assert forecast.reason in " ".join(text.split())


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = linear()
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan  # type: ignore[index]
    with pytest.raises(FedsimError, match="holds NaN or infinity"):
        told(model)


@pytest.mark.slow
def test_more_noise_never_raises_the_gain() -> None:
    clip = {"name": "clip", "norm": 0.1}
    found = [told(smooth(), defenses=[clip, *noise(std)]) for std in (0.0001, 0.01, 0.4)]
    gains = [forecast.estimate.gain for forecast in found]
    assert found[-1].attackable == "no" and found[-1].gain == gains[-1]
    assert all(after <= before for before, after in pairwise(gains))
    assert gains[-1] < gains[0]


def test_the_model_stays_as_it_was() -> None:
    model = normed().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told(model, 2)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def quadratic_map(weights: Tensor) -> tuple[UpdateMap, Tensor, Tensor]:
    """A softmax regression whose update of one image is nearly linear in it."""
    model, _ = live.take_apart(linear(), SHAPE, CLASSES)
    parameters = {name: value.detach() * weights for name, value in model.named_parameters()}
    training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=1.0)
    image = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(1)).double()
    assert isinstance(model, Classifier)
    return UpdateMap(model, parameters, {}, training, 1), image, torch.tensor([3])


def test_the_spectrum_is_that_of_the_jacobian() -> None:
    """Its moments are those of difference quotients along each pixel."""
    update_map, image, label = quadratic_map(3 * torch.ones(()))
    way = torch.rand(image.shape, generator=torch.Generator().manual_seed(2)).double()
    found = _lanczos(update_map, image, label, way, float(way.norm()))
    pixels = 1e-4 * torch.eye(64, dtype=torch.float64).view(64, *SHAPE)
    columns = [
        (update_map(image + each, label) - update_map(image - each, label)) / 2e-4
        for each in pixels
    ]
    matrix = torch.stack(columns, dim=1)
    gram = matrix.T @ matrix
    unit = way.flatten() / way.norm()
    values, weights = found.eigenvalues, found.weights
    pushed = gram @ unit
    for measured, exact in (
        ((weights * values).sum(), unit @ pushed),
        ((weights * values**2).sum(), pushed.square().sum()),
        (values.max(), torch.linalg.eigvalsh(gram).max()),
    ):
        assert float(measured) == pytest.approx(float(exact), rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 0}, "clients: expected at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"classes": 7}, "check classes"),
        ({"defenses": [{"name": "clipp", "norm": 1}]}, "clipp"),
        ({"defenses": [{"name": "clip", "norm": -1}]}, r"defenses\[0\] \(clip\)"),
        ({"defenses": [{"norm": 1}]}, r"defenses\[0\]: expected a name"),
        ({"images": IMAGES}, "their labels are missing"),
        ({"labels": LABELS}, "there are no images"),
        ({"images": IMAGES, "labels": torch.zeros(4)}, "labels: expected 4 integers"),
        ({"images": IMAGES + 1, "labels": LABELS}, r"images: expected pixels in \[0, 1\]"),
        ({"images": IMAGES[..., 1:], "labels": LABELS}, "images: expected shape"),
        ({"images": IMAGES, "labels": LABELS + CLASSES}, f"labels: expected 0 to {CLASSES - 1}"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    given = {"input_shape": SHAPE, "classes": CLASSES, "batch_size": 1}
    with pytest.raises(FedsimError, match=message):
        fedsim.preflight(linear(), **{**given, **wrong})


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def test_a_scenario_has_a_line_for_each_stack_and_batch_size(plan: Path) -> None:
    forecasts = preflight_file(plan)
    told = [(each.stack, each.batch_size) for each in forecasts]
    assert told == [("none", 1), ("none", 2), ("noise", 1), ("noise", 2)]
    assert forecasts[0].attackable == "yes"
    assert forecasts[2].attackable == "no"
    assert "test split of digits" in forecasts[0].source
    text = render(forecasts)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert forecasts[0].verdict.split(";")[0] in text.replace("\n", " ")
    assert "A no is a forecast" in text and "no proof" in text
    assert "A no is" not in render(forecasts[:2])


def test_the_command_prints_a_table_or_json(plan: Path) -> None:
    table = CliRunner().invoke(app, ["preflight", str(plan)])
    assert table.exit_code == 0 and "Attackable: 1 image behind none" in table.output
    done = CliRunner().invoke(app, ["preflight", str(plan), "--json", "--set", "model.hidden=[8]"])
    (first, *others) = json.loads(done.stdout)
    assert done.exit_code == 0 and len(others) == 3
    assert first["attackable"] == "yes" and math.isfinite(first["gain"])
    assert {each["name"] for each in first["indicators"]} >= {"labels", "local steps", "server"}


@pytest.mark.slow
@pytest.mark.usefixtures("attacks_here")
def test_a_run_is_forecast_at_weights_that_it_recorded(plan: Path, tmp_path: Path) -> None:
    out = fedsim.run(plan, out=tmp_path / "out", workers=1).out
    before, after = preflight_file(plan), preflight_file(out)
    assert [(f.stack, f.batch_size) for f in before] == [(f.stack, f.batch_size) for f in after]
    assert [f.gain for f in before] == pytest.approx([f.gain for f in after], abs=1e-6)
    assert after[0].rounds == (1,)


def test_origins_that_are_no_plan_are_refused(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([str(tmp_path / "empty")], "no scenario.yaml in it"),
        ([str(tmp_path / "none.yaml")], "none.yaml"),
        ([str(plan), "--set", "sweep={seed: [1, 2]}"], "one is forecast at a time"),
        ([str(plan), "--set", "data.source=diabetes"], "is a table"),
    ):
        done = CliRunner().invoke(app, ["preflight", *arguments])
        assert done.exit_code == 2, (arguments, done.output)
        assert message in done.output.replace("\n", ""), (arguments, done.output)
