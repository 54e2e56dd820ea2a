"""Results rows by figures that are known, and the answers that follow from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.report import leaderboard_rows, load_runs, positive_controls
from fedsim.report.answers import Answer, answers

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
        "privacy": privacy,
    }


def trials(values: Sequence[float | None], **case: Any) -> list[dict[str, Any]]:
    """One row for each PSNR."""
    return [trial(value, trial=number, **case) for number, value in enumerate(values)]


WORKS = trials([30.0, 31.0, 32.0, 33.0, 34.0], defense="none", ssim=0.9)
"""What makes the positive control pass."""

FAILS = [12.1, 11.9, 12.0, 11.8, 12.2]
"""PSNR of an attack that guesses: its mean gain is 0."""


def answered(
    folder: Path, lines: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]] = ()
) -> list[Answer]:
    """The answers of the first comparison among `lines`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds))
    rows = leaderboard_rows([folder])
    control = positive_controls(rows)[0]
    members = [row for row in rows if row.comparison == control.comparison]
    return answers(members, control, load_runs([folder]))


def behind(folder: Path, values: Sequence[float | None], **case: Any) -> Answer:
    """The answer for a defense whose trials have these PSNRs, beside attacks that work."""
    return next(a for a in answered(folder, [*WORKS, *trials(values, **case)]) if not a.undefended)
