"""The simulation engine: Flower's own, on Ray, in a child process that dies with its parent.

A process in which Ray failed or was interrupted can hang. Each client computes on the scenario's
`threads`, since that decides in which order floats are summed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from fedsim.federation.engine import FlowerEngine
from fedsim.federation.records import RoundRecord
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from fedsim.federation.client_app import FederationJob
    from fedsim.federation.network.link import Link
    from fedsim.federation.server_app import OnRound
    from fedsim.training.server import Server

_RECORD: TypeAdapter[RoundRecord] = TypeAdapter(RoundRecord)
# Time in which Ray may shut down in order before the child is killed.
_GRACE_SECONDS = 10.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}
# Bytes of the child's output that an error quotes.
_TAIL = 2000
# A Unix socket's path has at most 107 bytes on Linux, of which the names that Ray adds need most.
_SHORT_PATH = 40


class Simulation(FlowerEngine):
    """Runs several clients at a time, each in a process of Flower's own engine, on Ray."""

    def check(self) -> None:
        """Refuses, by a FedsimError, a machine on which Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise FedsimError(
                "federation.engine: simulation needs Ray, which is not installed; run "
                "pip install 'fedsim[simulation]', or leave federation.engine out"
            )

    def train(
        self, job: FederationJob, server: Server, on_round: OnRound, link: Link | None
    ) -> None:
        """Trains in a child process, see `FlowerEngine.train`; a FedsimError if that ends early."""
        scratch = Path(tempfile.mkdtemp(prefix="fedsim-"))  # Ray's sockets need a short path
        per_process = server.scenario.threads
        try:
            with (scratch / "log").open("w+b") as log:
                child = subprocess.Popen(
                    [sys.executable, "-m", "fedsim.federation.simulation"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # A process group of its own, so that Ray's processes can be killed together
                    # with it.
                    start_new_session=True,
                    env={**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(per_process)},
                )
                assert child.stdin and child.stdout
                try:
                    is_done = _follow(job, child.stdin, child.stdout, scratch, on_round)
                    with suppress(subprocess.TimeoutExpired):  # let Ray shut down in order
                        child.wait(_GRACE_SECONDS)
                    if not is_done:
                        log.seek(0)
                        said = log.read()[-_TAIL:].decode(errors="replace")
                        raise FedsimError(
                            f"the simulation engine ended with status {child.poll()} before the "
                            f"training did; its last words: {said or 'none'}"
                        )
                finally:
                    _end(child)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _follow(
    job: FederationJob, orders: IO[bytes], lines: IO[bytes], scratch: Path, on_round: OnRound
) -> bool:
    _tell(orders, {"job": asdict(job), "scratch": str(scratch)})
    for line in lines:
        said = json.loads(line)
        if "error" in said:
            raise FedsimError(said["error"])
        if "done" in said:
            return True
        on_round(_RECORD.validate_python(said["round"]))
        # Only then does the child write the checkpoint, after which no round is reported again.
        _tell(orders, {"recorded": said["round"]["round"]})
    return False


def _tell(pipe: IO[bytes], message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the child's death is seen where its lines are read
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.stdin:
        with suppress(BrokenPipeError):
            child.stdin.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout:
        child.stdout.close()


def main() -> None:
    """Runs as the child of `Simulation.train`: JSON of one job on stdin, of rounds on stdout."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Whatever a library prints is no line of ours.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Unbuffered: a buffered reader that a daemon thread waits on aborts the interpreter's exit.
    orders = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    start = json.loads(orders.readline())
    recorded: queue.Queue[int] = queue.Queue()
    scratch = Path(start["scratch"])
    threading.Thread(target=_listen, args=(orders, recorded, scratch), daemon=True).start()

    def say(message: dict[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    def on_round(record: RoundRecord) -> None:
        say({"round": asdict(record)})
        # The checkpoint is written once this returns: not before the parent has the round.
        recorded.get()

    try:
        _simulate(start["job"], scratch, on_round)
    except FedsimError as error:
        say({"error": str(error)})
    except Exception as error:  # the parent is to hear of it, whatever it is
        traceback.print_exc()
        cause = error.__cause__ or error
        say({"error": f"the simulation engine failed: {type(cause).__name__}: {cause}"})
    else:
        say({"done": True})


def _listen(orders: IO[bytes], recorded: queue.Queue[int], scratch: Path) -> None:
    """Passes on the parent's acknowledgements; when it is gone, ends this process and Ray's."""
    for line in orders:
        recorded.put(json.loads(line)["recorded"])
    shutil.rmtree(scratch, ignore_errors=True)
    # Only as the leader of its own group: any other group holds somebody else's processes.
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _simulate(settings: dict[str, Any], scratch: Path, on_round: OnRound) -> None:
    from flwr.simulation import run_simulation

    from fedsim.federation import client_app, server_app

    job = client_app.FederationJob(**settings)
    server = job.workload().server()
    run_simulation(
        server_app=server_app.build(server, Path(job.out), on_round),
        client_app=client_app.build(job),
        num_supernodes=server.scenario.data.clients,
        backend_config=_resources(server, scratch),
    )


def _resources(server: Server, scratch: Path) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    per_client = min(server.scenario.threads, cores or 1)
    schedule, last = server.schedule, server.scenario.training.rounds
    busy = max(len(schedule.round(1).participants), len(schedule.round(last).observed))
    # A worker beyond the clients that are asked at once would load the data for nothing.
    workers = max(1, min((cores or 1) // per_client, busy))
    init: dict[str, Any] = {
        "num_cpus": workers * per_client,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if len(str(scratch)) < _SHORT_PATH:
        init["_temp_dir"] = str(scratch / "ray")
    # Workers share the GPUs in fractions: Ray would not place one that asks for more than is there.
    gpus = torch.cuda.device_count() if server.device.type == "cuda" else 0
    return {
        "init_args": init,
        "client_resources": {"num_cpus": per_client, "num_gpus": min(1.0, gpus / workers)},
    }


if __name__ == "__main__":
    main()
