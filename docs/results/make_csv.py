"""Print the leaderboard of a finished run as the CSV files of this folder have it.

    fedsim run scenarios/reconstruction/table2-small.yaml
    python docs/results/make_csv.py runs/table2-small > docs/results/table2-small.csv

That is `fedsim leaderboard DIR --format csv` without the columns that are empty in every row and
the folder, its numbers rounded to six digits.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

from fedsim.report import leaderboard_rows, render


def main(folder: Path) -> None:
    """Print it."""
    rows = list(csv.DictReader(io.StringIO(render(leaderboard_rows([folder]), "csv"))))
    used = [name for name in rows[0] if name != "folders" and any(row[name] for row in rows)]
    writer = csv.DictWriter(sys.stdout, used, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: rounded(text) for name, text in row.items()} for row in rows)


def rounded(text: str) -> str:
    """A number of many digits with six of them; whatever else as it is."""
    try:
        return f"{float(text):.6g}" if "." in text or "e" in text else text
    except ValueError:
        return text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
