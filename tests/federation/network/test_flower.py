"""Flower's insides are those that were tried, and another version is refused."""

from __future__ import annotations

import importlib.metadata
import tomllib
import zipfile
from io import BytesIO

import pytest

from fedsim.federation import deployment
from fedsim.federation.network import flower
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
