"""Runs a federation over a network whose parts are all started on this machine: `fedsim up`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsim.federation.network.up import federation
from fedsim.federation.refusals import check_scenario
from fedsim.pipeline import collect, run
from fedsim.results.record import Run, refuse_other_run
from fedsim.scenario import dump, expand, open_document
from fedsim.system import paths
from fedsim.training.source import build_source
from fedsim.types import FedsimError


def up(
    scenario: str | Path,
    *,
    out: str | Path,
    nodes: int | None = None,
    overrides: Sequence[str] = (),
    shared_seed: bool = False,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = True,
) -> Run:
    """Runs a scenario over a SuperLink, a gate and nodes that are started on this machine for it.

    Args:
        scenario: Path of the scenario file, without a sweep.
        out: The run's folder to fill, which the returned `Run` reads. In it `nodes/` has the nodes'
            folders, and `network/` the logs of SuperLink and gate.
        nodes: Number of clients; None: as the scenario says.
        overrides: `a.b=value` assignments to the file's keys.
        shared_seed: Whether all nodes draw from the scenario's seed, and the truth is collected and
            attacks are scored at the end. Else `collect` does so later.
        resume: Whether to continue what an interrupted run of the same scenario left in `out`.
        workers: Number of processes that attack, see `fedsim.run`.
        quiet: Whether to show no progress.

    Raises:
        FedsimError: `fedsim.run` raises it, the file has a sweep, or a part does not start.
        RunFailed: `fedsim.run` raises it.
    """
    count = [] if nodes is None else [f"data.clients={nodes}"]
    # Put last, since later overrides win.
    asked = [*overrides, *count, "federation.engine=deployment"]
    variants = expand(open_document(scenario, asked))
    if len(variants) > 1:
        raise FedsimError("sweep: fedsim up runs one scenario; choose a variant with --set")
    wanted, root = variants[0].scenario, Path(out)
    paths.writable_folder(root, "--out")
    refuse_other_run(root, dump(wanted), resume)
    check_scenario(wanted)
    source = build_source(wanted.data.source).place
    named = [path for path in (source, wanted.data.partition.path, wanted.training.weights) if path]
    with federation(root, wanted.data.clients, paths=named, shared_seed=shared_seed) as there:
        finished = run(
            scenario,
            out=out,
            overrides=asked,
            resume=resume,
            workers=workers,
            quiet=quiet,
            link=there.link,
        )
    return collect(out, workers=workers, quiet=quiet) if shared_seed else finished
