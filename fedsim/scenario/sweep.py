"""The `sweep:` section: one file that stands for several scenarios."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.scenario.document import Document, read
from fedsim.scenario.explain import show
from fedsim.scenario.location import KeyPath, Problem, ScenarioError, dotted, parse
from fedsim.scenario.model import Scenario
from fedsim.scenario.overrides import Override, apply, parse_override
from fedsim.scenario.resolve import resolve

MAX_VARIANTS = 1000
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=,-]+")


class Variant(NamedTuple):
    """One scenario of a sweep."""

    assignment: dict[str, Any]
    """Swept key path -> the value it has here; empty if nothing is swept."""
    scenario: Scenario

    @property
    def label(self) -> str:
        """A stable name that is safe as a folder's: `training.local.steps=4`; empty for no sweep.

        Where a value had to be shortened, a digest of the assignment keeps the label unique.
        """
        exact = ",".join(f"{key}={_brief(value)}" for key, value in self.assignment.items())
        label = _UNSAFE.sub("-", exact)
        whole = all(not isinstance(value, (dict, list)) for value in self.assignment.values())
        if label == exact and whole and len(label) <= 100:
            return label
        digest = hashlib.sha256(json.dumps(self.assignment, sort_keys=True).encode()).hexdigest()
        return f"{label[:100]}-{digest[:8]}"


@dataclass(frozen=True)
class _Axis:
    key: str
    path: KeyPath
    values: tuple[Document, ...]


def open_document(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """The scenario file at `path` with `overrides` (`key=value`) in place, not yet validated.

    An override of a swept key pins it: the key is not swept any more.

    Raises:
        ScenarioError: the file cannot be read, or an override is wrong.
    """
    parsed, problems = [], []
    for text in overrides:
        try:
            parsed.append(parse_override(text))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(problems)
    document = read(path)
    if not isinstance(document.value, Mapping):
        return document
    return _pinned(apply(document, parsed), parsed)


def expand(document: Document | Mapping[str, Any] | Scenario) -> list[Variant]:
    """Every scenario that `document` stands for, in the order of the sweep's lists.

    The last list of the sweep varies fastest. Without a `sweep:` section there is one variant.

    Raises:
        ScenarioError: the sweep, or one of its scenarios, is wrong. All problems are listed.
    """
    if not isinstance(document, Document) or not isinstance(document.value, Mapping):
        document = document if isinstance(document, Document) else _document(document)
    axes = _axes(document)
    base = _without(document, ("sweep",))
    variants: list[Variant] = []
    problems: list[Problem] = []
    for values in product(*(axis.values for axis in axes)):
        assigned = [Override(axis.path, value) for axis, value in zip(axes, values, strict=True)]
        try:
            scenario = resolve(apply(base, assigned))
        except ScenarioError as error:
            problems += error.problems
            continue
        names = {axis.key: value.value for axis, value in zip(axes, values, strict=True)}
        variants.append(Variant(names, scenario))
    if problems:
        raise ScenarioError(problems)
    return variants
