"""The tools that a run can be copied to: each a store in a folder of this machine.

Nothing is sent anywhere: pictures of clients' data are among what is copied.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from fedsim.report.loggers.entries import Entries
from fedsim.report.pictures import from_png


@dataclass(frozen=True)
class Store(ABC):
    """Keeps copies of runs in `folder`."""

    package: ClassVar[str]
    """What it has to import."""
    default: ClassVar[str]
    """The folder where none is named."""

    folder: Path

    @abstractmethod
    def write(self, entries: Entries) -> None:
        """Copies one run; whatever goes wrong is raised."""


@final
class MLflow(Store):
    """MLflow: an SQLite database, and the pictures as artifacts beside it."""

    package = "mlflow"
    default = "mlflow"

    def write(self, entries: Entries) -> None:
        """See `Store`."""
        # By default MLflow tells its makers how it is used.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder.resolve()
        client = MlflowClient(tracking_uri=f"sqlite:///{whole}/mlflow.db")
        name = _allowed(entries.scenario)
        found = client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id
            if found
            else client.create_experiment(name, artifact_location=(whole / "artifacts").as_uri())
        )
        run = client.create_run(experiment, run_name=entries.variant or entries.scenario)
        identity, now = run.info.run_id, int(1000 * time.time())
        params = [Param(_allowed(k), v[:_LONGEST]) for k, v in entries.parameters.items()]
        for start in range(0, len(params), _PARAMS):
            client.log_batch(identity, params=params[start : start + _PARAMS])
        metrics = [Metric(_allowed(f.name), f.value, now, f.round) for f in entries.figures]
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(identity, metrics=metrics[start : start + _BATCH])
        with tempfile.TemporaryDirectory() as scratch:
            for picture in entries.pictures:
                *folders, last = _allowed(picture.name).split("/")
                path = Path(scratch) / f"{last}-round-{picture.round}.png"
                path.write_bytes(picture.png)
                client.log_artifact(identity, str(path), "/".join(folders))
        client.set_terminated(identity)


@final
class TensorBoard(Store):
    """TensorBoard: a file of events for each run, in a folder of its name."""

    package = "tensorboard"
    default = "tensorboard"

    def write(self, entries: Entries) -> None:
        """See `Store`."""
        import numpy as np
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = self.folder / _allowed(entries.scenario).replace("/", "_")
        if entries.variant:
            folder /= _allowed(entries.variant).replace("/", "_")
        with SummaryWriter(str(folder)) as writer:
            for figure in entries.figures:
                writer.add_scalar(figure.name, figure.value, figure.round)
            for picture in entries.pictures:
                pixels = np.asarray(from_png(picture.png))
                writer.add_image(picture.name, pixels, picture.round, dataformats="HWC")
            for key, value in entries.parameters.items():
                writer.add_text(key, value.replace("<", "&lt;"))


STORES: dict[str, type[Store]] = {"mlflow": MLflow, "tensorboard": TensorBoard}
"""By the names of the extras that bring their packages."""

_LONGEST = 500
"""MLflow's parameters have at least so many characters in each of its versions."""
_BATCH, _PARAMS = 1000, 100
"""So many figures, and parameters, MLflow takes at once."""


def _allowed(name: str) -> str:
    """Replaces the characters that MLflow refuses in names, and parts that are no file's name.

    A plus sign becomes a space, which no stack's or attack's name has: different ones stay apart.
    """
    spaced = name.replace("+", " ")
    parts = [re.sub(r"[^\w.\- /:]", "_", part, flags=re.ASCII) for part in spaced.split("/")]
    return "/".join(part if part.strip(". ") else "_" for part in parts)
