"""Flower's insides are those that were tried, and what a run asks of them."""

from __future__ import annotations

import importlib.metadata
import tomllib
import zipfile
from io import BytesIO

import pytest
from nodes_support import TINY

from fedsim.federation import deployment
from fedsim.federation.deployment import most_bytes
from fedsim.federation.network import flower
from fedsim.federation.secure_aggregation import plan
from fedsim.scenario import resolve
from fedsim.training.workload import Workload
from fedsim.types import FedsimError


def test_the_version_that_is_installed_is_known() -> None:
    deployment.Deployment().check()


def test_another_version_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.99.0")
    with pytest.raises(FedsimError, match=r"knows Flower 1\.41\.x, and 1\.99\.0 is.*pip install"):
        deployment.Deployment().check()


def test_a_bundle_holds_no_code() -> None:
    """Nodes execute what is installed; were Flower to run the bundle, nothing would happen."""
    with zipfile.ZipFile(BytesIO(flower._bundle())) as bundle:
        text = bundle.read("fedsim_run/__init__.py").decode()
        settings = tomllib.loads(bundle.read("pyproject.toml").decode())
    assert "import" not in text
    declared = set(settings["tool"]["flwr"]["app"]["config"])
    assert declared == {"version", "scenario", "stack", "run", "held"}


@pytest.mark.parametrize("secure", [False, True])
def test_an_answer_may_have_what_is_asked_for(secure: bool) -> None:
    stack = [{"name": "clip", "norm": 1.0}, "secure_aggregation"] if secure else []
    workload = Workload(resolve({**TINY, "defenses": {"one": stack}}), "one")
    parameters, _ = workload.initial()
    model = sum(tensor.nbytes for tensor in parameters.values())
    layout = plan.layout(workload, TINY["training"]["rounds"]) if secure else None
    asked = len(layout.sums) * layout.length * 4 if layout else model
    assert asked < most_bytes(workload) < 2 * asked + 2 * 2**20
