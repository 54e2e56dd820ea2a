"""What a user writes: a YAML file -> a `Scenario`, validated, with every default written out.

    load("scenarios/quickstart.yaml", ["training.rounds=10"])

`expand` does the same for a file with a `sweep:` section, which stands for several scenarios.
"""

from fedsim.scenario.document import Document, read
from fedsim.scenario.location import Problem, ScenarioError
from fedsim.scenario.model import Scenario
from fedsim.scenario.resolve import resolve


def load(path):
    return resolve(read(path))
