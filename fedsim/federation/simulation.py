"""The simulation engine: Flower's own, on Ray, in a child process.

Ray starts a cluster of processes, and a Python process in which it failed or was interrupted can
hang; so it gets a process of its own, which dies with its parent however that ends, and whose
processes die with it. The parent imports neither Ray nor Flower.

Each client computes with as many torch threads as the local engine would, since that decides in
which order floats are summed; OMP_NUM_THREADS says how many, and a machine of N cores runs
N / OMP_NUM_THREADS clients at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import TypeAdapter

from fedsim.federation.records import RoundRecord
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from fedsim.federation.client_app import Job
    from fedsim.federation.server_app import OnRound
    from fedsim.workload import Workload

_RECORD: TypeAdapter[RoundRecord] = TypeAdapter(RoundRecord)
_GRACE_SECONDS = 10.0
_TAIL = 2000


def require_ray() -> None:
    """Refuse to go on where Ray is not installed.

    Raises:
        FedsimError: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise FedsimError(
            "federation.engine: simulation needs Ray, which is not installed; run "
            "pip install 'fedsim[simulation]', or use the engine local"
        )


def run(job: Job, workload: Workload | None, on_round: OnRound) -> None:
    """Train what is left of `job` in a child process; `workload` cannot be handed to it.

    Raises:
        FedsimError: the child failed, with its own error, or with the end of what it printed.
    """
    scratch = Path(tempfile.mkdtemp(prefix="fedsim-"))  # Ray's sockets need a short path
    try:
        with (scratch / "log").open("w+b") as log:
            child = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "fedsim.federation.simulation"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(job.threads)},
            )
            assert child.stdin and child.stdout  # noqa: S101 - they are pipes
            try:
                _follow(job, child.stdin, child.stdout, scratch, on_round)
                child.wait(_GRACE_SECONDS)
            except _ChildDied as error:
                log.seek(0)
                said = log.read()[-_TAIL:].decode(errors="replace")
                raise FedsimError(
                    f"the simulation engine ended with status {child.poll()} before the training "
                    f"did; its last words: {said or 'none'}"
                ) from error
            finally:
                _end(child)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _ChildDied(Exception):  # noqa: N818
    """The child's output ended in the middle."""


def _follow(
    job: Job, orders: IO[bytes], lines: IO[bytes], scratch: Path, on_round: OnRound
) -> None:
    """Start the child's work and hand on its rounds until it says that it is done.

    A round is acknowledged once `on_round` has returned: only then does the child write the
    checkpoint after which the round would not be reported again.
    """
    _tell(orders, {"job": asdict(job), "scratch": str(scratch)})
    for line in lines:
        said = json.loads(line)
        if "error" in said:
            raise FedsimError(said["error"])
        if "done" in said:
            return
        on_round(_RECORD.validate_python(said["round"]))
        _tell(orders, {"recorded": said["round"]["round"]})
    raise _ChildDied


def _tell(pipe: IO[bytes], message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the child's death is seen where its lines are read
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the child behind: it leads a process group of its own."""
    if child.stdin:
        with suppress(BrokenPipeError):
            child.stdin.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout:
        child.stdout.close()
