"""How near to this machine's limits an iteration of gradient matching runs.

Counted on the method written straight down in PyTorch (`plain` of attack.py): the operations of an
iteration's convolutions and matrix products, two for a multiplication and its addition, and the
bytes these read and write, as if all else were fused into them. An iteration needs at least as long
as a matrix product takes for so many operations here, and as a copy does for so many bytes; the
share is what the larger of the two is of the time taken. It can be above 1: of the eight forward
passes' worth that autograd takes seven are needed, and Winograd's convolutions do with as little as
a quarter of the operations of others.

    python benchmarks/roofline.py [--case NAME] [--batches 1 4 8] [--repeats N] [--json FILE]
                                  [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from attack import CASES, Runner, Suite, finish, floating_point_peak, plain_runner, speed, victim
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedsim.data.bundled import Photos
from fedsim.system.device import resolve_device

_PRODUCTS = ("convolution", "convolution_backward", "mm", "addmm", "bmm")


class ByteCounter(TorchDispatchMode):
    """Bytes of the tensors that convolutions and matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in _PRODUCTS:
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            self.total += sum(t.nbytes for t in tensors)
        return result


def counted(run: Runner) -> tuple[float, float]:
    """(GFLOP, GB) of one iteration: two iterations' less one's."""
    operations, traffic = [], []
    for iterations in (1, 2):
        with FlopCounterMode(display=False) as flops, ByteCounter() as moved:
            run(iterations, iterations)
        operations.append(flops.get_total_flops() / 1e9)
        traffic.append(moved.total / 1e9)
    return operations[1] - operations[0], traffic[1] - traffic[0]


def bandwidth(device: str) -> float:
    """Measured bandwidth of a copy of 256 MB (of 4 GB on a GPU), in GB/s read and written."""
    source = torch.rand(2**26 if device == "cpu" else 2**30, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        finish(device)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a timed run of the plain one"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    rows = []
    for case in arguments.case or list(CASES):
        for batch in arguments.batches:
            suites = {
                name: Suite(name, case, batch, None, arguments.threads, device)
                for name in ("fedsim", "plain")
            }
            measured = speed(suites, arguments.repeats, arguments.seconds)["iterations_per_second"]
            for suite in suites.values():
                suite.close()
            gflop, gigabytes = counted(
                plain_runner(*victim(case, batch, Photos().load().train_images))
            )
            peak, rate = floating_point_peak(device), bandwidth(device)
            limit = max(gflop / peak, gigabytes / rate)
            row = {
                "case": case,
                "batch": batch,
                "gflop": round(gflop, 2),
                "gigabytes": round(gigabytes, 3),
                "peak_gflop_per_second": round(peak),
                "gigabytes_per_second": round(rate, 1),
                "bound": "operations" if limit == gflop / peak else "bytes",
                "limit_iterations_per_second": round(1 / limit, 1),
                "iterations_per_second": measured,
                "share": {name: round(limit * each, 2) for name, each in measured.items()},
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
