"""Chooses the tools that a run is copied to, before its work, and copies it, after its end."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path

from fedsim.report.loggers.entries import entries
from fedsim.report.loggers.stores import STORES, Store
from fedsim.results.reading import load_runs
from fedsim.system import paths
from fedsim.types import FedsimError


def chosen(names: Sequence[str]) -> list[Store]:
    """Returns the tools that `names` ask for, such as `mlflow` or `tensorboard=DIR`.

    Raises:
        FedsimError: there is no such tool, its extra is not installed, or its folder cannot be
            written to.
    """
    return [_store(name) for name in names]


def _store(name: str) -> Store:
    tool, _, folder = name.partition("=")
    if tool not in STORES:
        close = difflib.get_close_matches(tool, STORES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise FedsimError(f"--log: expected one of {', '.join(STORES)}, got {tool!r}{hint}")
    kind = STORES[tool]
    try:
        importlib.import_module(kind.package)
    except Exception as error:  # a third party's import may raise anything
        raise FedsimError(
            f"--log {tool}: {kind.package} cannot be imported ({error}); install the extra: "
            f"pip install '.[{tool}]'"
        ) from error
    target = Path(folder or kind.default)
    paths.writable_folder(target, f"--log {tool}")
    return kind(target)


def log_run(folder: Path | str, stores: Sequence[Store]) -> list[str]:
    """Copies a finished run, or all variants of a sweep, to `stores`.

    Returns a line for each tool that failed, with the reason: nothing of the run is lost by that.

    Raises:
        ReportError: `folder` holds no results, or a file in it is damaged.
    """
    copies = [entries(run) for run in load_runs([folder])]
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
