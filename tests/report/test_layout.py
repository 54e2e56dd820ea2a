"""In a browser the page fits a phone, a tablet and a desk, and its details open without a mouse."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, write_run

from fedsim.report import write_report

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome")
                 if (p := shutil.which(n))), None)  # fmt: skip

WIDTHS = (360, 768, 1280)

MEASURE = """
const widths = %s;
addEventListener("load", () => {
  const results = widths.map(width => {
    const frame = document.getElementById("w" + width);
    const page = frame.contentDocument, root = page.documentElement;
    const scrolls = element => /auto|scroll/.test(frame.contentWindow.getComputedStyle(element).overflowX);
    const inside = element => {
      for (let e = element.parentElement; e; e = e.parentElement) if (scrolls(e)) return true;
      return false;
    };
    const beyond = [...page.body.querySelectorAll("*")].filter(element => {
      const box = element.getBoundingClientRect();
      return box.width && box.right > 0 && (box.right > width + 1 || box.left < -1) && !inside(element);
    });
    const button = page.querySelector(".matrix .name");
    const explanation = page.getElementById(button.getAttribute("popovertarget"));
    const before = explanation.matches(":popover-open");
    button.click();
    const box = explanation.getBoundingClientRect();
    return {
      width, view: root.clientWidth, content: root.scrollWidth,
      beyond: beyond.map(e => e.tagName + "." + e.className + ": " + e.textContent.slice(0, 60)),
      before, after: explanation.matches(":popover-open"),
      explanation: [box.left, box.right], focusable: button.tabIndex >= 0,
    };
  });
  document.body.innerHTML = "";
  document.body.dataset.results = JSON.stringify(results);
});
"""  # noqa: E501


def measured(page: str, folder: Path) -> list[dict[str, Any]]:
    """Opens `page` in a frame of each width and measures it from outside."""
    frames = "".join(
        f'<iframe id="w{width}" style="width: {width}px; height: 800px; border: 0" '
        f'srcdoc="{html.escape(page, quote=True)}"></iframe>'
        for width in WIDTHS
    )
    script = MEASURE % json.dumps(WIDTHS)
    outer = folder / "frames.html"
    outer.write_text(f"<!doctype html><body>{frames}<script>{script}</script></body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [str(CHROMIUM), *options, profile, outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'data-results="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return results


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with long names, many columns and several variants."""
    folder = tmp_path_factory.mktemp("sweep")
    long = replace(STACKS["pruning"], members=({"name": "a_defense_with_a_very_long_name"},) * 3)
    stacks = {
        "none": STACKS["none"],
        "dp": STACKS["dp"],
        "pruning-with-a-name-that-nobody-would-choose": long,
    }
    for rate in (0.1, 0.01):
        case = {"trials": 3, "batch_sizes": (1, 4), "variant": {"training.local.lr": rate}}
        write_run(folder / f"lr={rate}", stacks=stacks, **case)  # type: ignore[arg-type]
    return write_report(folder).read_text()


def test_nothing_overflows_and_details_open_by_their_button(page: str, tmp_path: Path) -> None:
    for result in measured(page, tmp_path):
        assert result["view"] == result["width"] >= result["content"], result
        assert result["beyond"] == [], result["width"]
        assert (result["before"], result["after"], result["focusable"]) == (False, True, True)
        left, right = result["explanation"]
        assert 0 <= left < right <= result["width"]


def test_what_overflows_is_found(page: str, tmp_path: Path) -> None:
    """The measure itself: an element that is too wide is seen at the width where it is."""
    wide = re.sub("<main[^>]*>", '<main><div class="wide-one" style="width: 700px">x</div>', page)
    phone, tablet, _ = measured(wide, tmp_path)
    assert any("wide-one" in text for text in phone["beyond"]) and phone["content"] > 360
    assert tablet["beyond"] == []
