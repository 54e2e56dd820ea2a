"""Print a finished run as the CSV files of this folder have it.

    fedsim run scenarios/reconstruction/table2-small.yaml
    python docs/results/make_csv.py runs/table2-small > docs/results/table2-small.csv

That is `fedsim leaderboard DIR --format csv` without the columns that are empty in every row and
the folder, its numbers rounded to six digits. Of a run that attacks nothing it is what each stack's
last round costs, a line for each run in the folders. Both have one column more: `late_train_loss`,
a stack's mean loss over the second half of its rounds.

    python docs/results/make_csv.py --by-trial runs/board-* > docs/results/board-small.csv

prints a line for each trial, of few columns: trials of one network are not independent, and attacks
on one batch are compared in pairs.
"""

from __future__ import annotations

import csv
import io
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedsim.report import attacks_nothing, leaderboard_rows, load_runs, render
from fedsim.report.leaderboard import gains, group_apart, over_other, value_of
from fedsim.results.reading import StoredRun

TRIAL_METRICS = ("psnr", "ssim", "haarpsi", "label_accuracy")
UTILITY = ("defense", "round", "epsilon", "test_loss", "test_accuracy", "test_examples")


def main(words: list[str]) -> None:
    """Print it."""
    folders = [Path(word) for word in words if word != "--by-trial"]
    if "--by-trial" in words:
        rows = list(by_trial(folders))
    else:
        silent = attacks_nothing(load_runs(folders))
        rows = list(utility(folders) if silent else leaderboard(folders))
    used = [name for name in rows[0] if name != "folders" and any(row[name] for row in rows)]
    writer = csv.DictWriter(sys.stdout, used, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: rounded(text) for name, text in row.items()} for row in rows)


def leaderboard(folders: list[Path]) -> Iterator[dict[str, str]]:
    """The lines of the leaderboard."""
    rows = leaderboard_rows(folders)
    require_end(row.ended for row in rows)
    late = late_losses(load_runs(folders))
    for line in csv.DictReader(io.StringIO(render(rows, "csv"))):
        yield {**line, "late_train_loss": late.get(line["defense"], "")}


def by_trial(folders: list[Path]) -> Iterator[dict[str, str]]:
    """Every trial of each run; one without an answer has no gain, those of a group share images."""
    runs = load_runs(folders)
    require_end(run.ended for run in runs)
    # Two processes attack: rows are written as they are done.
    trials = [
        (run.setting("seed"), row)
        for run in runs
        for row in sorted(run.rows, key=lambda row: (row.batch_size, row.client, row.trial))
    ]
    groups = group_apart([row for _, row in trials])
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    for index, (seed, row) in enumerate(trials):
        (gain,) = gains([row], "psnr") or [""]
        line: dict[str, object] = {
            "seed": seed,
            "defense": row.defense.name,
            "attack": row.attack.label,
            "batch_size": row.batch_size,
            "client": row.client,
            "trial": row.trial,
            "group": group_of[index],
            "ok": row.ok,
            "gain": gain,
            "over_other": over_other([row], "psnr")[0],
        }
        for name in TRIAL_METRICS:
            line |= {
                name: value_of(row.metrics, name),
                f"{name}_guess": value_of(row.baseline, name),
            }
        line["test_accuracy"] = row.utility.test_accuracy if row.utility else None
        line["seconds"] = row.cost.seconds if row.cost else None
        yield {name: "" if value is None else str(value) for name, value in line.items()}


def require_end(ended: Iterable[bool]) -> None:
    """Stop where a run has not ended."""
    if not all(ended):
        sys.exit("a run has not ended, or is not scored to its end: continue it with --resume")


def late_losses(runs: list[StoredRun]) -> dict[str, str]:
    """Stack -> mean training loss over the second half of its rounds, of all runs together."""
    losses: dict[str, list[float]] = {}
    for run in runs:
        middle = max((row.round for row in run.rounds), default=0) / 2
        for row in run.rounds:
            if row.round > middle and row.train_loss is not None:
                losses.setdefault(row.defense, []).append(row.train_loss)
    return {stack: str(statistics.fmean(each)) for stack, each in losses.items()}


def utility(folders: list[Path]) -> Iterator[dict[str, str]]:
    """The last round of each stack in each run."""
    for run in load_runs(folders):
        last = {row.defense: row for row in run.rounds}
        late = late_losses([run])
        for row in last.values():
            figures = {name: str(getattr(row, name)) for name in UTILITY}
            figures["late_train_loss"] = late.get(row.defense, "")
            yield {"seed": str(run.setting("seed")), **figures}


def rounded(text: str) -> str:
    """A number of many digits with six of them; whatever else as it is."""
    try:
        return f"{float(text):.6g}" if "." in text or "e" in text else text
    except ValueError:
        return text


if __name__ == "__main__":
    main(sys.argv[1:])
