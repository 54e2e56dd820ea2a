"""`fedsim validate` refuses what `fedsim run` refuses, with the same words."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny import tiny_scenario

import fedsim
from fedsim import acceptance
from fedsim.federation import refusals
from fedsim.scenario import expand
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError

SCENARIO = tiny_scenario(data__clients=3, training__local={"batch_size": 2})
SECURE = {"defenses": {"s": [{"name": "clip", "norm": 1.0}, "secure_aggregation"]}}
QUIET = {"name": "secure_aggregation", "noise_multiplier": 1e-9}
REFUSED: dict[str, dict[str, Any]] = {
    "one participant": {**SECURE, "federation": {"participation": 0.3}},
    "buffer_range": {**SECURE, "model": {"name": "resnet18", "width": 4}},
    "noise that rounding eats": {"defenses": {"s": [{"name": "clip", "norm": 1.0}, QUIET]}},
    "a large batch": {"training": {"local": {"batch_size": 1000}}},
    "no neurons to plant": {"observe": {"plant": True, "batch_sizes": [1]}},
    "nothing to audit": {"audit": {"method": "two_worlds"}},
    "no weights": {"training": {"weights": "lost.safetensors"}},
    "no folder": {"data": {"source": {"name": "image_folder", "path": "lost"}}},
    "no strategy": {"federation": {"strategy": "FedAgv"}},
    "another delta": {
        "defenses": {"d": [{"name": "dp_sgd", "norm": 1.0, "epsilon": 8.0, "delta": 1e-3}]}
    },
    "an epsilon of no claim": {
        "defenses": {"d": [{"name": "dp_sgd", "norm": 1.0, "epsilon": 8.0}]},
        "data": {**SCENARIO["data"], "partition": {"name": "shards", "shards_per_client": 2}},
    },
    "no device": {"device": "cuda:99"},
}


def refusal(ask: Any) -> str:
    with pytest.raises(FedsimError) as caught:
        ask()
    return str(caught.value)


def test_images_of_one_class_are_refused_before_any_work(tmp_path: Path) -> None:
    folder = tmp_path / "photos" / "only"
    folder.mkdir(parents=True)
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    source = {"name": "image_folder", "path": str(folder.parent)}
    one = {**SCENARIO, "data": {"source": source, "clients": 2}}
    for ask in (acceptance.validate, partial(fedsim.run, out=tmp_path / "out", workers=1)):
        with pytest.raises(FedsimError, match=r"data\.source: .*one class"):
            ask(one)
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.parametrize("why", REFUSED)
def test_both_refuse(why: str, tmp_path: Path) -> None:
    asked = {**SCENARIO, **REFUSED[why]}
    said = refusal(lambda: fedsim.validate(asked))
    assert said == refusal(lambda: fedsim.run(asked, out=tmp_path / "out"))
    assert not (tmp_path / "out" / "scenario.yaml").exists()


LISTS = ("OF_SCENARIO", "OF_CLIENTS", "OF_STACK", "OF_RUN")


@pytest.mark.parametrize("questions", LISTS)
def test_both_ask_every_question(
    questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so each that is in a list: they are asked from it."""

    def refuse(*_: object) -> None:
        raise FedsimError(f"refused by {questions}")

    asked = getattr(refusals, questions)
    assert len(asked) > 1
    monkeypatch.setattr(refusals, questions, [*asked, refuse])
    for ask in (lambda: fedsim.validate(SCENARIO), lambda: fedsim.run(SCENARIO, out=tmp_path)):
        assert refusal(ask).endswith(f"refused by {questions}")


def test_no_question_is_left_out_of_its_list() -> None:
    asked = {ask for questions in LISTS for ask in getattr(refusals, questions)}
    defined = {
        value
        for name, value in vars(refusals).items()
        if inspect.isfunction(value)
        and value.__module__ == refusals.__name__
        and not name.startswith("check")
    }
    assert defined <= asked


@pytest.mark.slow
def test_what_is_valid_says_what_privacy_depends_on() -> None:
    stack = {"d": [{"name": "dp_sgd", "norm": 1.0, "epsilon": 8.0}]}
    probes = {"batch_sizes": [1], "trials": 3}
    (found,) = acceptance.validate({**SCENARIO, "defenses": stack, "observe": probes})
    data, rounds, local, probed, claimed = found.lines()
    assert "3 clients each with at least 479 images" in data
    assert rounds == "rounds: 1, each of 3 of 3 clients"
    assert local == "local training: 1 step of 2 images, sampling without_replacement"
    assert "3 releases" in probed and "included" in probed
    assert claimed.startswith("d: noise_multiplier ") and "for epsilon 8, ε = 7.9" in claimed


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fedsim.validate(SCENARIO)
    assert list(tmp_path.iterdir()) == []


def test_copies_of_observed_images_among_public_ones_are_told_before_the_run() -> None:
    scenario = expand({**SCENARIO, "data": {"source": "faces", "clients": 2}})[0].scenario
    data = load_dataset(scenario)
    assert isinstance(data, Dataset)
    for client, count in ((0, 1), (1, 0)):
        own = Workload(scenario, "none", data).parts[client][:1]
        public = torch.cat([data.test_images, data.train_images[own]])
        labels = torch.cat([data.test_labels, data.train_labels[own]])
        copied = replace(data, test_images=public, test_labels=labels)
        assert len(acceptance.describe_near_copies(Workload(scenario, "none", copied))) == count
    assert acceptance.describe_near_copies(Workload(scenario, "none", data)) == []
