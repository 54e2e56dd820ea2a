"""Copies a finished run, pictures of clients' data too, to an experiment tool's local store."""

from __future__ import annotations

import importlib
import math
import os
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from torch import Tensor

from fedsim.report.content import Content
from fedsim.report.facts import utility
from fedsim.report.figures import describe_stack
from fedsim.report.pictures import encode_png
from fedsim.report.row import LeaderboardRow
from fedsim.results.reading import StoredRun, load_runs
from fedsim.scoring import METRICS
from fedsim.system import paths
from fedsim.types import FedsimError
from fedsim.words import describe_variant, format_epsilon


@dataclass(frozen=True, kw_only=True)
class _LoggedRun:
    """Holds all that is copied of one run; parts of names are separated by slashes."""

    scenario: str
    variant: str
    parameters: dict[str, str]
    """Name -> settings of the scenario in words, and the ε of each defense."""
    numbers: list[tuple[str, float, int]]  # (name, finite value, round)
    pictures: list[tuple[str, Tensor, int]]
    """(name, (H, W, C) uint8 pixels, round): images above, what an attack made of them below."""


def _collect(run: StoredRun) -> _LoggedRun:
    """Returns what is copied of `run`; a damaged reconstruction has no picture."""
    content = Content([run])
    plates = [(row, content.plates.get(row.cell)) for row in content.rows]
    return _LoggedRun(
        scenario=str(run.setting("name") or run.record.get("scenario") or run.folder.name),
        variant=describe_variant(run.record.get("variant") or {}),
        parameters=_parameters(run),
        numbers=[
            (name, float(value), round)
            for name, value, round in _numbers(run, content.rows)
            if value is not None and math.isfinite(value)
        ],
        pictures=[
            (f"reconstructions/{_name(row)}", plate.grid(), row.round)
            for row, plate in plates
            if plate and plate.pairs
        ],
    )


def _parameters(run: StoredRun) -> dict[str, str]:
    named = {
        "data": run.setting("data", "source"),
        "model": run.setting("model"),
        "algorithm": run.setting("training", "algorithm"),
        "rounds": run.setting("training", "rounds"),
        "clients": run.setting("data", "clients"),
        "engine": run.setting("federation", "engine"),
        "seed": run.setting("seed"),
    }
    parameters = {
        name: describe_stack([value]) if isinstance(value, dict) else str(value)
        for name, value in named.items()
        if value is not None
    }
    for name, stack in (run.setting("defenses") or {}).items():
        parameters[f"defenses/{name}"] = describe_stack(stack) or "no defense"
    for row in utility([run]):
        terms = [format_epsilon(row.epsilon)]
        terms += [f"delta {row.delta:g}"] if row.delta is not None else []
        terms += [str(term) for term in (row.unit, row.relation, row.covers, row.reason) if term]
        parameters[f"epsilon/{row.defense}"] = ", ".join(terms)
    return parameters


def _numbers(
    run: StoredRun, rows: Sequence[LeaderboardRow]
) -> Iterator[tuple[str, float | None, int]]:
    """Yields (name, value, round) of all rounds, and of all attacks with their intervals."""
    for each in run.rounds:
        for name in ("train_loss", "test_loss", "test_accuracy", "epsilon"):
            value = getattr(each, name)
            value = math.inf if value == "inf" else value
            yield f"rounds/{each.defense}/{name}", value, each.round
    for row in rows:
        shown = {name: row.metrics[name] for name, metric in METRICS.items() if metric.heading}
        values: dict[str, float | None] = {"n": row.n, "n_ok": row.n_ok}
        for name, summary in {"gain": row.gain, **shown}.items():
            if summary:
                values |= {name: summary.mean}
                values |= {f"{name}_low": summary.low, f"{name}_high": summary.high}
        for name, value in values.items():
            yield f"attacks/{_name(row)}/{name}", value, row.round


def _name(row: LeaderboardRow) -> str:
    sight = f"{row.sight}/" if row.sight else ""
    threat = "" if row.threat.is_default else f"{row.threat.title.replace('/', '_')}/"
    return f"{row.defense}/{row.attack}/{threat}{sight}b{row.batch_size}"


@dataclass(frozen=True)
class _Store(ABC):
    """Keeps copies of runs in `folder`."""

    package: ClassVar[str]
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that the package reads while it is imported."""

    folder: Path

    @classmethod
    def load(cls) -> None:
        """Imports the package; errors of the import are raised as they are."""
        os.environ.update(cls.environment)
        importlib.import_module(cls.package)

    @abstractmethod
    def write(self, run: _LoggedRun) -> None:
        """Copies one run into `folder`; errors of the package are raised as they are."""


@final
class _MLflow(_Store):
    """MLflow: an SQLite database, and the pictures as artifacts beside it."""

    package = "mlflow"
    # By default MLflow tells its makers how it is used, and prepares that while it is imported.
    environment: ClassVar[Mapping[str, str]] = {"MLFLOW_DISABLE_TELEMETRY": "true"}

    def write(self, run: _LoggedRun) -> None:
        self.load()
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder.resolve()
        client = MlflowClient(tracking_uri=f"sqlite:///{whole}/mlflow.db")
        name = _allow(run.scenario)
        # MLflow refuses to create an experiment whose name exists.
        found = client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id
            if found
            else client.create_experiment(name, artifact_location=(whole / "artifacts").as_uri())
        )
        created = client.create_run(experiment, run_name=run.variant or run.scenario)
        identity, now = created.info.run_id, int(1000 * time.time())
        params = [Param(_allow(k), v[:_LONGEST]) for k, v in run.parameters.items()]
        for start in range(0, len(params), _PARAMS):
            client.log_batch(identity, params=params[start : start + _PARAMS], synchronous=True)
        metrics = [Metric(_allow(name), value, now, round) for name, value, round in run.numbers]
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(identity, metrics=metrics[start : start + _BATCH], synchronous=True)
        with tempfile.TemporaryDirectory() as scratch:
            for name, pixels, round in run.pictures:
                *folders, last = _allow(name).split("/")
                path = Path(scratch) / f"{last}-round-{round}.png"
                # MLflow takes artifacts only from files, which it copies.
                path.write_bytes(encode_png(pixels))
                client.log_artifact(identity, str(path), "/".join(folders))
        client.set_terminated(identity)


@final
class _TensorBoard(_Store):
    """TensorBoard: a file of events for each run, in a folder of its name."""

    package = "tensorboard"

    def write(self, run: _LoggedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = self.folder / _allow(run.scenario).replace("/", "_")
        if run.variant:
            folder /= _allow(run.variant).replace("/", "_")
        with SummaryWriter(str(folder)) as writer:
            for name, value, round in run.numbers:
                writer.add_scalar(name, value, round)
            for name, pixels, round in run.pictures:
                writer.add_image(name, pixels, round, dataformats="HWC")
            for name, words in run.parameters.items():
                writer.add_text(name, words.replace("<", "&lt;"))


STORES: dict[str, type[_Store]] = {"mlflow": _MLflow, "tensorboard": _TensorBoard}
"""Name of the extra that brings a package, and of the default folder -> the store."""

_LONGEST = 500
"""MLflow's parameters have at least so many characters in each of its versions."""
_BATCH, _PARAMS = 1000, 100
"""So many figures, and parameters, MLflow takes at once."""


def _allow(name: str) -> str:
    """Replaces the characters that MLflow refuses in names, and parts that are no file's name."""
    spaced = name.replace("+", " ")
    parts = [re.sub(r"[^\w.\- /:]", "_", part, flags=re.ASCII) for part in spaced.split("/")]
    return "/".join(part if part.strip(". ") else "_" for part in parts)


def chosen(names: Sequence[str]) -> list[_Store]:
    """Returns the stores, for `log_run`, that `names` ask for: `mlflow` or `tensorboard=DIR`, say.

    Without `=DIR` the folder is the one of the tool's name in the working directory. A FedsimError
    says that a tool is unknown, its extra not installed, or its folder not to be written to.
    """
    stores: list[_Store] = []
    for name in names:
        tool, _, folder = name.partition("=")
        if tool not in STORES:
            raise FedsimError(f"--log: expected one of {', '.join(STORES)}, got {tool!r}")
        kind = STORES[tool]
        try:
            kind.load()
        except Exception as error:  # a third party's import may raise anything
            raise FedsimError(
                f"--log {tool}: {kind.package} cannot be imported ({error}); install the extra: "
                f"pip install '.[{tool}]'"
            ) from error
        target = Path(folder or tool)
        paths.writable_folder(target, f"--log {tool}")
        stores.append(kind(target))
    return stores


def log_run(folder: Path | str, stores: Sequence[_Store]) -> list[str]:
    """Copies a finished run or sweep to `stores` (`chosen`); returns a line for each that failed.

    A ReportError says that `folder` holds no run, or one that is damaged.
    """
    copies = [_collect(run) for run in load_runs([folder])]
    problems = []
    for store in stores:
        try:
            for copy in copies:
                store.write(copy)
        except Exception as error:  # a third party's logger may raise anything
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            problems.append(
                f"WARNING: the copy of {folder} to {store.package} in {store.folder} is not "
                f"complete: {first}; the run itself is whole"
            )
    return problems
