"""Stock Flower apps, tapped, witnessed, attacked: what each of them gives away, and in what time.

    python benchmarks/stock_apps_runner.py --out /tmp/stock

Apps and the lines that change in them are in tests/federation/stock_apps. They run in this process,
over fedsim's grid and Flower's own serialization, with all that is theirs: strategies, mods, models
and training loops. Tests import `build` and `run` from here.
"""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict

from fedsim.federation.local import LocalGrid, identity

APPS = Path(__file__).parent.parent / "tests" / "federation" / "stock_apps"
_DIFFS = ("app", "data", "tap")
_COLOR = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True, kw_only=True)
class App:
    """One stock app, and what an attacker has to be told of it."""

    original: str
    """Folder of the files as published."""
    model: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    nodes: int = 60
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the app's own run configuration, as `flwr run --run-config` makes them."""
    defenses: tuple[Mapping[str, object], ...] = ()


_CNN = "pytorchexample.task:Net"
_SIGMA = 0.1 * (2 * torch.log(torch.tensor(1.25 / 1e-5))).sqrt().item() / 50
APP = {
    "quickstart": App(original="quickstart", model=_CNN, mean=_COLOR[0], std=_COLOR[1]),
    "advanced": App(
        original="advanced",
        model="pytorch_example.task:Net",
        mean=(0.1307,),
        std=(0.3081,),
        nodes=40,
    ),
    "embedded": App(
        original="embedded", model="embeddedexample.task:Net", mean=(0.5,), std=(0.5,), nodes=100
    ),
    "resnet": App(original="quickstart", model=_CNN, mean=_COLOR[0], std=_COLOR[1], nodes=10),
    "local_dp": App(
        original="quickstart",
        model=_CNN,
        mean=_COLOR[0],
        std=_COLOR[1],
        defenses=({"name": "clip", "norm": 0.1}, {"name": "gaussian_noise", "std": _SIGMA}),
    ),
}


def build(name: str, folder: Path, *, tapped: bool = True) -> Path:
    """Makes the app in `folder`, which is new: the original, its changes, and what stands in."""
    shutil.copytree(APPS / APP[name].original / "original", folder)
    for kind in _DIFFS if tapped else _DIFFS[:-1]:
        diff = APPS / name / f"{kind}.diff"
        if diff.exists():
            subprocess.run(["git", "apply", "-p1", str(diff)], cwd=folder, check=True)
    for stand_in in ("offline.py", "wandb.py"):
        shutil.copy(APPS / stand_in, folder)
    return folder


def changed_lines(name: str, kind: str) -> int:
    """Returns how many lines a diff adds, or replaces, or removes; 0 if there is none."""
    diff = APPS / name / f"{kind}.diff"
    if not diff.exists():
        return 0
    lines = diff.read_text(encoding="utf-8").splitlines()
    counts = [
        sum(line.startswith(sign) and not line.startswith(sign * 3) for line in lines)
        for sign in "+-"
    ]
    return max(counts)


class _AppGrid(LocalGrid):
    """Nodes with the run configuration of an app."""

    def __init__(self, app: Any, nodes: int, config: Mapping[str, Any]) -> None:
        super().__init__(app, nodes, timeout=600)
        self._config = config

    def _context(self, node: int) -> Context:
        context = super()._context(node)
        number = context.node_config["partition-id"]
        context.run_config = dict(self._config)
        context.node_config["dataset-path"] = f"{number}-of-{len(self._nodes)}"
        return context


@contextmanager
def imported(folder: Path) -> Iterator[None]:
    """Lets the app's modules be imported inside the block, and forgets them after it."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - before:
            if str(getattr(sys.modules[module], "__file__", "")).startswith(str(folder)):
                del sys.modules[module]


def run(name: str, folder: Path, *, seed: int = 0, nodes: int | None = None, **config: Any) -> None:
    """Runs the app that `build` made; recordings are in its `tapped` and `witnessed`."""
    app = APP[name]
    document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    flower = document["tool"]["flwr"]["app"]
    settings = {**flower["config"], **app.config, "num-server-rounds": 1, **config}
    settings = {key.replace("_", "-"): value for key, value in settings.items()}
    torch.manual_seed(seed)
    random.seed(seed)  # Flower's strategies sample nodes from it
    with identity(), imported(folder):
        server, client = (_loaded(flower["components"][f"{side}app"]) for side in SIDES)
        grid = _AppGrid(client, nodes or app.nodes, settings)
        context = Context(
            run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings
        )
        server(grid, context)


SIDES = ("server", "client")


def _loaded(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    """Prints a line for each app."""
    import fedsim

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--apps", nargs="+", default=list(APP))
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    chosen = parser.parse_args()
    print("app | lines | images | attack | labels | PSNR dB | guess dB | run s | report s")
    for name in chosen.apps:
        app, folder = APP[name], chosen.out / name
        build(name, folder)
        started = time.perf_counter()
        run(name, folder)
        ran = time.perf_counter()
        with imported(folder):
            finished = fedsim.assess(
                folder / "tapped",
                app.model,
                truth=folder / "witnessed",
                out=folder / "report",
                mean=app.mean,
                std=app.std,
                attacks={
                    "label_inference": {},
                    "inverting_gradients": {"iterations": chosen.iterations},
                },
                defenses=app.defenses,
                clients=chosen.clients,
                name=name,
            )
        reported = time.perf_counter()
        for label in ("label_inference", "inverting_gradients"):
            rows = [row for row in finished.rows() if row["attack"]["label"] == label]
            cells = [
                _mean([row["metrics"]["label_accuracy"] for row in rows], 2),
                _mean([row["metrics"]["psnr"] for row in rows], 1),
                _mean([row["baseline"]["psnr"] for row in rows], 1),
            ]
            sizes = sorted({len(row["victims"]) for row in rows if row["victims"]})
            facts = [name, changed_lines(name, "tap"), sizes, label, *cells]
            seconds = [f"{ran - started:.0f}", f"{reported - ran:.0f}"]
            print(" | ".join(map(str, [*facts, *seconds])), flush=True)
            for row in rows:
                if row["reason"]:
                    print(f"  {row['observation']}: {row['reason']}")


def _mean(values: list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.{digits}f}" if known else "-"


if __name__ == "__main__":
    main()
