"""Tests what every plugin keeps to, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import pydantic
import pytest

from fedsim.contracts.plugins import Plugin

P = TypeVar("P", bound=Plugin)


class PluginContract(ABC, Generic[P]):
    """Tests the parameters and the source of any plugin."""

    @abstractmethod
    def make(self) -> P:
        """Returns the plugin under test."""

    def test_parameters_are_resolved_and_unknown_ones_refused(self) -> None:
        """A record's parameters make the same plugin again; a typo is refused."""
        plugin = self.make()
        resolved = plugin.model_dump(mode="json")
        assert type(plugin).model_validate(resolved) == plugin
        with pytest.raises(pydantic.ValidationError):
            type(plugin).model_validate({**resolved, "no_such_parameter": 1})

    def test_the_source_is_cited(self) -> None:
        """Users are shown `paper` and the docstring's first line."""
        assert self.make().paper
        assert (type(self.make()).__doc__ or "").strip()
