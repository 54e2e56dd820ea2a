"""Reads what a user writes, a YAML file, as a valid `Scenario` with every default written out.

    scenario = load("scenarios/quickstart.yaml", ["training.rounds=10"])

A file with a `sweep:` section stands for several scenarios:

    for assignment, scenario in expand(open_document("scenarios/sweep.yaml")):
        ...
"""

from fedsim.scenario.build import build_stack, declared_training
from fedsim.scenario.checks import cautions
from fedsim.scenario.document import Document, ScenarioError, ScenarioProblem
from fedsim.scenario.model import Scenario
from fedsim.scenario.resolve import dump, json_schema, resolve
from fedsim.scenario.sweep import (
    Variant,
    expand,
    grant_of,
    load,
    locate,
    open_document,
    parameters_of,
)

__all__ = [
    "Document",
    "Scenario",
    "ScenarioError",
    "ScenarioProblem",
    "Variant",
    "build_stack",
    "cautions",
    "declared_training",
    "dump",
    "expand",
    "grant_of",
    "json_schema",
    "load",
    "locate",
    "open_document",
    "parameters_of",
    "resolve",
]
