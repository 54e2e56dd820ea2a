"""Seconds until a mean PSNR of some dB, on the same gradients, each suite in a process of its own.

`factored_inversion` and `inverting_gradients`, of the whole update and of the body alone, against
the public suite breaching's `invertinggradients` and `modern` (without its regularization of
features) where it is importable, on a ConvNet with a planted two-layer head. Each runs
whole attacks of doubling length until one reaches the target; the figure is that one's time, set-up
and feature recovery included. Nothing has trained the model, unless --recordings names those of a
run (runs/NAME/observations/STACK/round-NNNN), of one gradient each.

    python benchmarks/time_to_quality.py [--target DB] [--batch N] [--victims N] [--shortest N]
                                         [--longest N] [--only SUITE] [--recordings FOLDER]
                                         [--images FILE_OR_FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from attack import Suite

_NAMES = {
    "factored": "factored_inversion",
    "fedsim": "inverting_gradients",
    "fedsim-body": "inverting_gradients, body",
    "breaching": "breaching",
    "breaching-modern": "breaching, modern",
}


def until(suite: Suite, index: int, target: float, shortest: int, longest: int) -> dict[str, Any]:
    """Of the first length that reaches `target` dB, or of the longest: what it took and found."""
    length = shortest
    while True:
        seconds, psnr = suite.ask("run", length, length, index)
        if psnr >= target or 2 * length > longest:
            return {
                "reached": psnr >= target,
                "seconds": round(seconds, 1),
                "psnr": round(psnr, 2),
                "iterations": length,
            }
        length *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=float, default=20.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--victims", type=int, default=3)
    parser.add_argument("--shortest", type=int, default=150, help="iterations")
    parser.add_argument("--longest", type=int, default=4800, help="iterations")
    parser.add_argument("--only", choices=_NAMES, action="append")
    parser.add_argument("--recordings", type=str, help="folder of a run's recordings to attack")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--images", type=str, help="image folder or zip; default: bundled photos")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    case = arguments.recordings or "convnet-planted"
    suites = {
        name: Suite(name, case, arguments.batch, arguments.images, arguments.threads)
        for name in arguments.only or _NAMES
    }
    suites = {name: suite for name, suite in suites.items() if suite.ask("available")}
    for index in range(arguments.victims):
        for name, suite in suites.items():
            found = until(suite, index, arguments.target, arguments.shortest, arguments.longest)
            rows.append({"victim": index, "attack": _NAMES[name], **found})
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    for suite in suites.values():
        suite.close()


if __name__ == "__main__":
    main()
