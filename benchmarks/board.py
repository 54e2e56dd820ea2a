"""Seconds that the leaderboard page takes with many rows, in a headless Chromium.

    python benchmarks/board.py --rows 10000

It makes a run folder of that many attacked cells with three trials each, whose figures are drawn at
random, and prints what building the page, loading it, and filtering, searching, sorting and
switching in it take.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

TRIALS = 3
REPEATS = 5

ACTIONS = {
    "search": "search.value = TURN % 2 ? 'attack_3' : 'attack_4'; tell(search, 'input')",
    "filter defense": "set('defense', TURN % 2 ? 'defense_3' : 'defense_4')",
    "filter attack": "set('attack', TURN % 2 ? 'attack_3' : 'attack_4')",
    "show all views": "set('scope', TURN % 2 ? 'view' : 'all')",
    "switch batch size": "set('batch', TURN % 2 ? '8' : '4')",
    "switch metric": "set('metric', TURN % 2 ? 'ssim' : 'psnr')",
    "sort": "document.querySelector('#rows thead th:nth-child(3)').click()",
}
"""What a reader does, in JavaScript; every second turn undoes it."""

PRELUDE = """
const tell = (field, event) => field.dispatchEvent(new Event(event, { bubbles: true }));
const set = (id, value) => {
  const field = document.getElementById(id);
  field.value = value;
  tell(field, 'change');
};
const drawn = () => new Promise((done) => {
  new MutationObserver((_, watch) => { watch.disconnect(); done(); })
    .observe(document.querySelector('#rows tbody'), { childList: true });
});
const search = document.getElementById('search');
"""


def main() -> None:
    """Measures and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000, help="lines of the leaderboard")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), arguments.rows), indent=2))


def measure(folder: Path, count: int) -> dict[str, float]:
    """Returns the figures of a page of so many rows: seconds, megabytes and milliseconds."""
    from fedsim.board import write_board

    run = folder / "run"
    run.mkdir()
    with (run / "results.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines(count))
    start = time.perf_counter()
    page = write_board([run], folder / "board.html")
    figures = {
        "rows": count,
        "build_s": round(time.perf_counter() - start, 2),
        "page_mb": round(page.stat().st_size / 1e6, 2),
    }
    return figures | in_browser(page.as_uri())


def in_browser(address: str) -> dict[str, float]:
    """Returns medians in milliseconds: until the page is drawn, and of each action."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        loads = []
        for _ in range(REPEATS):
            driver.get("about:blank")
            driver.get(address)
            loads.append(
                driver.execute_script(
                    "return performance.getEntriesByType('navigation')[0].loadEventEnd"
                )
            )
        figures = {"load_ms": statistics.median(loads)}
        set_all = f"{PRELUDE} set('scope', 'all')"
        driver.execute_script(set_all)
        for name, action in ACTIONS.items():
            times = []
            for turn in range(REPEATS):
                script = (
                    f"{PRELUDE} const [done] = arguments; const start = performance.now();"
                    f"const shown = drawn(); {action.replace('TURN', str(turn))};"
                    # The layout is part of what a reader waits for.
                    "shown.then(() => { document.body.offsetHeight;"
                    "done(performance.now() - start); });"
                )
                times.append(driver.execute_async_script(script))
            figures[f"{name.replace(' ', '_')}_ms"] = statistics.median(times)
            driver.execute_script(
                f"{PRELUDE} search.value = ''; tell(search, 'input'); set('defense', '');"
                "set('attack', ''); set('scope', 'all')"
            )
        return {name: round(value, 1) for name, value in figures.items()}
    finally:
        driver.quit()


def lines(count: int) -> Iterator[dict[str, Any]]:
    """Yields the trials of `count` cells."""
    draw = random.Random(0)  # noqa: S311
    grants = ("none", "inferred")
    cells = product(range(1, 100), grants, (1, 2, 4, 8, 16), range(20), range(10))
    for position, (round, labels, batch, defense, attack) in enumerate(cells):
        if position == count:
            return
        for trial in range(TRIALS):
            yield line(draw, round, labels, batch, defense, attack, trial)


def line(
    draw: random.Random,
    round: int,
    labels: str,
    batch: int,
    defense: int,
    attack: int,
    trial: int,
) -> dict[str, Any]:
    """Returns one line of `results.jsonl` with random figures.

    Args:
        draw: where the figures come from.
        round: of the federation.
        labels: what is granted of the labels.
        batch: number of images.
        defense: its number; 0 is no defense.
        attack: its number.
        trial: its number.
    """
    psnr = draw.uniform(9, 35) if defense else draw.uniform(25, 35)
    members = [{"name": f"member_{defense}", "parameters": {"std": defense / 10}}]
    return {
        "scenario": "board",
        "dataset": "photos",
        "model": {"name": "convnet", "parameters": {}},
        "defense": {"name": f"defense_{defense}", "stack": members if defense else []},
        "attack": {"name": f"attack_{attack}", "label": f"attack_{attack}"},
        "vantage": "server",
        "knowledge": {"labels": labels},
        "batch_size": batch,
        "round": round,
        "client": 0,
        "trial": trial,
        "seed": trial,
        "status": "ok",
        "metrics": {
            "psnr": psnr,
            "ssim": draw.random(),
            "rmse": 10 ** (-psnr / 20),
            "label_accuracy": draw.random(),
        },
        "baseline": {"psnr": 14.0, "ssim": 0.2, "rmse": 0.2, "label_accuracy": 0.1},
        "control": {"other_update": {"psnr": 10.0, "label_accuracy": 0.1}},
        "utility": {
            "test_accuracy": 0.7 - defense / 100,
            "test_examples": 1000,
            "test_chance": 0.1,
        },
        "privacy": {"epsilon": float(defense) if defense else "inf", "audited_epsilon": 0.5},
        "cost": {"seconds": 10.0},
    }


if __name__ == "__main__":
    main()
