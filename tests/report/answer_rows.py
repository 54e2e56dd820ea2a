"""Results rows by figures that are known, and the verdicts that follow from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.report import load_runs
from fedsim.report.content import Content
from fedsim.report.judge import Judgement, Verdict

Lines = list[dict[str, Any]]

DP = [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 1.1}]

PROVEN: dict[str, Any] = {
    "epsilon": 2.0,
    "delta": 1e-5,
    "accountant": "gaussian",
    "unit": "client",
    "relation": "zero_out",
    "audited_epsilon": None,
}
NOTHING: dict[str, Any] = {"epsilon": "inf", "reason": "no noise is added"}


def trial(
    psnr: float | None,
    *,
    trial: int = 0,
    defense: str = "dp",
    attack: str = "inverting_gradients",
    privacy: dict[str, Any] = NOTHING,
    server: str = "honest",
    vantage: str = "server",
    accuracy: float = 0.9,
    **metrics: float,
) -> dict[str, Any]:
    """A results row against a guess of 12 dB; another update gives 9 dB; None is a failure."""
    stack = [] if defense == "none" else DP
    return {
        "scenario": "s",
        "dataset": "faces",
        "model": {"name": "lenet", "parameters": {}},
        "learner": "sgd",
        "training": {},
        "defense": {"name": defense, "stack": stack},
        "attack": {"name": attack, "label": attack, "restarts": 1, "parameters": {}},
        "vantage": vantage,
        "server": server,
        "knowledge": {"labels": "inferred", "bn": "none"},
        "batch_size": 1,
        "round": 1,
        "client": 0,
        "trial": trial,
        "seed": trial,
        "observation": f"{defense}/round-0001/client-0000-b1-t{trial}",
        "status": "failed" if psnr is None else "ok",
        "reason": "it diverged" if psnr is None else None,
        "metrics": {} if psnr is None else {"psnr": psnr, **metrics},
        "baseline": {"name": "mean_image", "psnr": 12.0, "label_accuracy": 0.2},
        "control": {"other_update": {"psnr": 9.0, "label_accuracy": 0.2}},
        "utility": {"test_accuracy": accuracy, "test_examples": 1000, "test_chance": 0.1},
        "privacy": dict(privacy),
    }


def trials(values: Sequence[float | None], **case: Any) -> Lines:
    return [trial(value, trial=number, **case) for number, value in enumerate(values)]


def changed(rows: Lines, **parts: Any) -> Lines:
    """The same trials with other parts; of a part that is a mapping, those entries alone.

    Numbers in it are a little more in each trial, so that they have an interval.
    """

    def change(row: dict[str, Any], name: str, part: Any, i: int) -> Any:
        if not isinstance(part, dict):
            return part
        entries = {k: v + i / 1e4 if isinstance(v, float) else v for k, v in part.items()}
        return (row.get(name) or {}) | entries

    return [
        row | {name: change(row, name, part, i) for name, part in parts.items()}
        for i, row in enumerate(rows)
    ]


def controlled(rows: Lines, of: str | None, **other: float) -> Lines:
    """The same trials, scored against another update of that kind; without any by default."""
    return [row | {"control": {"of": of, "other_update": other or None}} for row in rows]


WORKS = trials([30.0, 31.0, 32.0, 33.0, 34.0], defense="none", ssim=0.9)
"""What makes the positive control pass."""

FAILS = [12.1, 11.9, 12.0, 11.8, 12.2]
"""PSNR of an attack that guesses: its mean gain is 0."""

SAFE = trials(FAILS, privacy=PROVEN)
"""Trials behind a defense that is relied on."""


def save(folder: Path, lines: Lines, rounds: Lines | None = None) -> Path:
    """Writes these rows as a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds or []))
    return folder


def judged(folder: Path, lines: Lines, rounds: Lines | None = None) -> Judgement:
    """The judgement of the first comparison among `lines`."""
    return Content(load_runs([save(folder, lines, rounds)])).judgements[0]


def behind(folder: Path, lines: Lines, plain: Lines = WORKS) -> Verdict:
    """The verdict on the defense, beside attacks without one."""
    return next(v for v in judged(folder, [*plain, *lines]).verdicts if not v.undefended)
