"""Loads the scenario's data source, and lists what was taken from private data without noise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields

from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.data.batches import distinct
from fedsim.scenario import Scenario
from fedsim.scenario.build import build_learner, plugin_class
from fedsim.scenario.document import blaming
from fedsim.scenario.model import PluginRef
from fedsim.system import memory
from fedsim.system.paths import from_home, open_regular
from fedsim.types import Dataset, Table, Unit

_BY_LABEL = ("dirichlet", "shards")
"""Partitions in which one example's label decides where others go."""
_BY_PLACE = ("iid", "file")
_EQUAL = (
    "which of a client's images probes are drawn from: of equal images one, so that each other is "
    "drawn more often than sampling amplifies by (remove equal images, or declare probes no part "
    "of the deployment: privacy.probes: outside)"
)
_WEIGHTS = (
    "training.weights, which may be of a model of the same clients (if none of their data had a "
    "part in them, declare it: `privacy: {weights: public}`)"
)


def load_dataset(scenario: Scenario) -> Dataset | Table:
    """Loads all data of the scenario's source; errors are those of `load_source`."""
    return load_source(scenario.data.source)


def load_source(chosen: PluginRef) -> Dataset | Table:
    """Loads the data that `chosen` names; a FedsimError says that they cannot be found or read.

    Further errors are those of `build_source`.
    """
    with blaming("data.source"):
        return build_source(chosen).load()


def build_source(chosen: PluginRef) -> DataSource:
    """Builds the source `chosen`; FedsimError if not installed, ValidationError for parameters."""
    source = plugin_class("fedsim.data", chosen.name).model_validate(chosen.parameters)
    assert isinstance(source, DataSource)
    return source


def digest_of_inputs(scenario: Scenario, dataset: Dataset | Table) -> str:
    """Returns a SHA-256 in hex of the data, weights and partition file that a scenario only names.

    Two runs of the same scenario have the same data only if their digests are equal. `dataset` is
    all that the scenario's source loads. A file that cannot be read is a FedsimError or OSError.
    """
    digest = hashlib.sha256()
    for field in fields(dataset):
        value = getattr(dataset, field.name)
        if isinstance(value, Tensor):
            digest.update(f"{field.name} {value.dtype} {tuple(value.shape)}\0".encode())
            digest.update(value.contiguous().numpy().data)
        elif field.name not in _TOLD:
            digest.update(f"{field.name} {value!r}\0".encode())
    for named in (scenario.data.partition.path, scenario.training.weights):
        if named is not None:
            with open_regular(from_home(named), memory.limit()) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


_TOLD = ("name", "left_out")
"""Fields of a data set that tell where it came from, and influence no result."""


def private_statistics(
    scenario: Scenario, dataset: Dataset | Table, owns: Iterable[Tensor], *, dealt: bool = True
) -> Mapping[Unit, tuple[str, ...]]:
    """Returns what a federation's set-up took from training data without noise, in words.

    Keys are `client` and `example`: nothing can be claimed for a unit whose tuple is not empty.
    Initial weights count unless the scenario declares them public. A partition by labels, and equal
    images of a client that answers counted probes, count for `example` alone.

    Args:
        scenario: The scenario.
        dataset: Data that the clients hold.
        owns: (n,) indices of each known client's training examples in `dataset`.
        dealt: Whether the scenario's partition dealt the data; False if clients brought them.
    """
    found = dataset.private_statistics
    if found is None:
        # A source that declares nothing counts as private, since silence proves nothing.
        kind = type(dataset).__name__
        found = (f"data source {dataset.name} does not declare {kind}.private_statistics",)
    if scenario.training.weights is not None and scenario.privacy.weights != "public":
        found += (_WEIGHTS,)
    of_examples = found
    if _draws_of_different(scenario, dataset, owns):
        of_examples += (_EQUAL,)
    # Data that clients bring were dealt by nobody, so no label decided who holds them.
    if not dealt:
        return {"client": found, "example": of_examples}
    partition = scenario.data.partition.name
    if partition in _BY_LABEL:
        of_examples += (f"partition {partition}, which deals examples by their labels",)
    placed = isinstance(dataset, Dataset) and dataset.placed_by_label
    if placed and partition in _BY_PLACE and scenario.data.clients > 1:
        of_examples += (
            f"partition {partition}, which deals examples by their places, in which labels have a "
            "say where files of two classes share a name (give each file a name of its own)",
        )
    return {"client": found, "example": of_examples}


def _draws_of_different(
    scenario: Scenario, dataset: Dataset | Table, owns: Iterable[Tensor]
) -> bool:
    """Whether counted probes draw from fewer images than a client holds, since some are equal."""
    counted = scenario.observe.batch_sizes and scenario.privacy.probes == "included"
    if (
        not counted
        or not isinstance(dataset, Dataset)
        or not build_learner(scenario.learner).trains
    ):
        return False
    return any(len(distinct(own, dataset.train_images)) < len(own) for own in owns)
