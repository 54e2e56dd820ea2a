"""The page for everybody: no serious finding of axe-core, and nothing too wide at any width."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser

axe_core = pytest.importorskip("axe_core_python", reason="needs the extra `test`")
AXE = Path(axe_core.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
WIDTHS = {"phone": 360, "tablet": 768, "desk": 1280}
RUN = """
const [options, done] = arguments;
const failed = (error) => done([{ id: String(error), impact: "critical", nodes: [{ html: "" }] }]);
axe.run(document, options).then((found) => done(found.violations), failed);
"""


def serious(browser: Browser) -> list[str]:
    """What axe-core finds that keeps people out, with where it is."""
    browser.run(AXE)
    found = browser.driver.execute_async_script(RUN, {"resultTypes": ["violations"]})
    return [
        f"{violation['id']}: {violation['nodes'][0]['html'][:200]}"
        for violation in found
        if violation["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_nothing_serious_and_nothing_too_wide(browser: Browser, page: str, width: int) -> None:
    browser.prefer("light")
    browser.open(page, width=width)
    for theme in ("light", "dark"):
        browser.prefer(theme)
        browser.wait(lambda: browser.run("return document.documentElement.dataset.shade") == theme)  # noqa: B023
        assert serious(browser) == []
        assert browser.run("return document.documentElement.scrollWidth") <= width


def test_nothing_serious_in_an_invalid_setting_or_in_details(browser: Browser, page: str) -> None:
    browser.prefer("light")
    browser.open(page, width=360)
    browser.choose("setting", "INVALID")
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    for theme in ("light", "dark"):
        browser.choose("theme", theme)
        assert serious(browser) == []
    browser.click("#matrix .cell")
    assert serious(browser) == []


def test_axe_finds_what_it_is_for(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.run(
        "document.querySelector('#search').parentElement.replaceWith(document.querySelector('#search'))"
    )
    browser.run("document.querySelector('#search').removeAttribute('placeholder')")
    assert any(finding.startswith("label") for finding in serious(browser))
