"""What data brings stays text: no script of a name runs, and no picture has to be there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from board_runs import FORMULA, HOSTILE, LONG, QUOTES
from browser import Browser

from fedsim.board.compact import SENTENCE, SHOWN
from fedsim.board.data import board_data
from fedsim.board.page import html, policy

VENDOR = Path(__file__).parents[2] / "fedsim" / "board" / "vendor"


def test_hostile_names_are_shown_as_text(browser: Browser, page: str) -> None:
    browser.prefer("light")
    browser.open(page)
    browser.choose("setting", "window.pwned")
    browser.click("#matrix .cell")
    browser.run("document.getElementById('detail').close()")
    assert browser.complaints() == []
    assert browser.run("return window.pwned") is None
    assert (
        browser.run(
            "return document.querySelectorAll('img[src=\"x\"], main b, main script').length"
        )
        == 0
    )
    headings = browser.texts("#worst h3")
    assert HOSTILE in headings and QUOTES in headings
    assert FORMULA in browser.text("#matrix thead") and HOSTILE in browser.text("#rows")
    assert browser.run("return document.querySelectorAll('#matrix img').length") == 0


def test_a_script_that_gets_into_the_page_does_not_run(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.run(
        "const script = document.createElement('script'); script.textContent = 'window.pwned = 1';"
        "document.body.append(script)"
    )
    assert browser.run("return window.pwned") is None
    assert any("Content Security Policy" in text for text in browser.complaints())


def test_long_texts_are_cut(runs: Path) -> None:
    data = board_data([runs])
    assert max(map(len, data["texts"])) < SHOWN + 50
    assert LONG[: SENTENCE + 1] not in json.dumps(data)
    assert any(f"{len(LONG) + 13:,} characters" in text for text in data["texts"])


def test_no_text_ends_the_data(runs: Path) -> None:
    page = html(board_data([runs]))
    [embedded] = re.findall(r'id="board-data">(.*?)</script>', page, re.DOTALL)
    assert HOSTILE in json.loads(embedded)["texts"]
    assert page.count("</script>") == 5  # the data, three libraries and the page's own part


def test_damaged_and_missing_pictures_are_said_and_do_no_harm(tmp_path: Path) -> None:
    from synthetic_run import STACKS, write_run

    run = write_run(
        tmp_path / "run", stacks={"none": STACKS["none"]}, trials=2, batch_sizes=(1,), rounds=2
    )
    damaged, missing = sorted((run / "reconstructions" / "none").glob("*"))[:2]
    for path in damaged.rglob("*.safetensors"):
        path.write_bytes(b"no tensors")
    for path in missing.rglob("*.safetensors"):
        path.unlink()
    data = board_data([run])
    by_attack = {data["texts"][row["attack"]]: row for row in data["rows"]}
    assert "problem" in by_attack[damaged.name]["pictures"]
    assert "pictures" not in by_attack[missing.name]


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_lets_nothing_be_fetched_but_data(live: bool) -> None:
    text = policy(["one"], live)
    assert "default-src 'none'" in text and "unsafe-eval" not in text
    assert f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}" in text
    scripts = text.partition("script-src ")[2].partition(";")[0]
    assert "unsafe-inline" not in scripts and "sha256-" in scripts


def test_libraries_are_the_released_ones_with_their_licenses() -> None:
    import hashlib

    table = (VENDOR / "README.md").read_text(encoding="utf-8")
    scripts = sorted(VENDOR.glob("*.js"))
    assert len(scripts) == 3
    for path in scripts:
        assert hashlib.sha256(path.read_bytes()).hexdigest() in table, path.name
        assert (VENDOR / f"{path.name.partition('.')[0]}.LICENSE.txt").is_file()
        assert "</script" not in path.read_text(encoding="utf-8").lower()
