"""Debian's chromium without a screen, by selenium (extra "browser"): for benchmarks of pages, and for their tests."""

from __future__ import annotations

import shutil
from typing import Any

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


def start_browser() -> Any:
    """A driver whose console can be read; ``quit()`` ends it.

    Raises:
        ImportError: selenium is not installed.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for word in OPTIONS:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
