"""A headless Chromium for the tests of a page, and what they ask it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
"""Keys as WebDriver writes them."""


class Browser:
    """One window, in which pages are opened one after the other."""

    def __init__(self, downloads: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = CHROMIUM or ""
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ):
            options.add_argument(argument)
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.downloads = downloads

    def open(self, address: str, width: int = 1280, height: int = 900, drawn: bool = True) -> None:
        """Open a page afresh in a window of that size, and wait until it is `drawn`."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        self.complaints()
        self.driver.get(address)
        if drawn:
            self.wait(lambda: self.run("return document.querySelector('#rows tbody td') !== null"))

    def prefer(self, scheme: str) -> None:
        """Pretend that the system is light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script on the page returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, is_so: Callable[[], Any], seconds: float = 20) -> Any:
        """Wait until something is so, and return it."""
        end = time.monotonic() + seconds
        while not (found := is_so()):
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.05)
        return found

    def address(self) -> str:
        """The address of the page, as the page itself has it."""
        return str(self.run("return location.href"))

    def text(self, selector: str) -> str:
        """The visible text of the first element that fits."""
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def texts(self, selector: str) -> list[str]:
        """The visible texts of all elements that fit."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"
        return [str(text) for text in self.run(script, selector)]

    def options(self, name: str) -> list[str]:
        """What can be chosen in the field of that id."""
        return self.texts(f"#{name} option")

    def choose(self, name: str, words: str) -> None:
        """Choose the first option whose text has `words`, as a user does."""
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import Select

        field = Select(self.driver.find_element(By.ID, name))
        [*fitting] = [o.text for o in field.options if words in o.text]
        field.select_by_visible_text(fitting[0])

    def click(self, selector: str) -> None:
        """Click the first element that fits."""
        from selenium.webdriver.common.by import By

        found = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    def type(self, selector: str, keys: str) -> None:
        """Type into the first element that fits."""
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).send_keys(keys)

    def press(self, keys: str) -> None:
        """Type into whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(keys)

    def download(self, selector: str, name: str) -> str:
        """Click, and return the text of the file that is saved."""
        path = self.downloads / name
        path.unlink(missing_ok=True)
        self.click(selector)
        self.wait(path.exists)
        return path.read_text(encoding="utf-8")

    def complaints(self) -> list[str]:
        """What the console says since the last time: errors of scripts, refusals of the policy."""
        return [json.dumps(entry) for entry in self.driver.get_log("browser")]


def browser(downloads: Path) -> Iterator[Browser]:
    """A browser, closed at the end; the test is skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    pytest.importorskip("selenium", reason="needs the extra `test`")
    opened = Browser(downloads)
    try:
        yield opened
    finally:
        opened.driver.quit()
