"""The site: it builds without a warning, fetches nothing, its reference is whole, its pictures are made by the script,
and in a browser no page complains or is wider than the screen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import filelock  # torch needs it too
import pytest

import mindspeed_fx
from benchmarks import pictures
from mindspeed_fx import cli
from mindspeed_fx.options import Options
from mindspeed_fx.passes.manager import PASSES
from tests.docs.blocks import PAGES, ROOT

SAMPLE = (
    "index",
    "guide/first_steps",
    "guide/several_devices",
    "options",
    "reference/python",
    "features",
    "mindspeed_flags",
)
"""Pages that are opened at both widths in the usual tier; the slow one opens all."""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra docs)")
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / "documentation"
    with filelock.FileLock(root / "documentation.lock"):  # one build for all processes of a run
        if not (folder / "index.html").is_file():
            words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_fetches_nothing(site):
    """Every script, style, font and picture of a page lies beside it."""
    tag = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?([^\"' >]+)|<link[^>]*\shref=[\"']?([^\"' >]+)[^>]*>"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) + 5
    for page in pages:
        for match in tag.finditer(page.read_text()):
            address = match[1] or match[2]
            if "canonical" in match[0] or address.startswith("data:"):
                continue
            assert not re.match(r"(\w+:)?//", address), (page.name, address)
            path = address.partition("#")[0].partition("?")[0]
            assert page.name == "404.html" or (page.parent / path).exists(), (page.name, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", style.read_text()), style


def test_the_reference_names_everything(site):
    text = {name: (site / f"{name}.html").read_text() for name in ("reference/python", "reference/passes", "options")}
    for name in set(mindspeed_fx.__all__) - {"__version__", "passes"}:
        assert f'id="{name.lower()}"' in text["reference/python"], name
    for one in PASSES:
        assert f"<code>{one.name}</code>" in text["reference/passes"], one.name
    for option in Options.__dataclass_fields__:
        assert f'id="{option}"' in text["options"], option
    command_line = (site / "reference/command_line.html").read_text()
    for name in cli._parser()._subparsers._group_actions[0].choices:
        assert f'id="mindspeed-fx-{name}"' in command_line, name
    assert "--memory-curve" in command_line and ":func:" not in text["reference/python"]


def test_comments_of_the_tests_are_not_shown(site):
    for page in site.rglob("*.html"):
        assert not re.search(r"<!-- (setup|not run|slow|npu)", page.read_text()), page


# ---------------------------------------------------------------- pictures


def shown() -> dict[str, str]:
    """Picture under docs/pictures -> a page that shows it."""
    found = {}
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / page).read_text()):
            path = ((ROOT / page).parent / target).resolve()
            assert path.is_file() and path.parent == ROOT / "docs" / "pictures", (page, target)
            found[path.name] = page
    return found


def test_every_picture_is_made_by_the_script_and_shown():
    """No picture without a function that makes it, no function whose picture is not committed and shown."""
    committed = {p.name for p in (ROOT / "docs" / "pictures").iterdir()}
    assert set(shown()) == committed == set(pictures.PICTURES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in pictures.FROM_REPORTS else [])
        for name in pictures.PICTURES
        if name.endswith(".svg")
    ],
)
def test_a_picture_is_what_the_script_makes(name, tmp_path):
    made = pictures.make(name, tmp_path).read_text()
    told = f"python -m benchmarks.pictures {name} makes another picture today; look at it and commit it"
    assert made == (ROOT / "docs" / "pictures" / name).read_text(), told


@pytest.mark.slow
def test_the_picture_of_the_page_is_made(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    made = pictures.make("page.png", tmp_path).read_bytes()
    assert made[:8] == b"\x89PNG\r\n\x1a\n" and len(made) > 20_000


def test_the_readme_has_the_measured_numbers_of_the_picture():
    """Both are read from the same printed results."""
    table = (ROOT / "README.md").read_text()
    for _, time, peak in pictures.measured_rows():
        assert f"{time:.2f}" in table and f"{peak:.2f}" in table, (time, peak)


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120 and max(map(len, lines)) <= 120


def test_new_pages_are_as_wide_as_the_code():
    """Tables aside, whose rows are lines."""
    for page in sorted((ROOT / "docs" / "guide").glob("*.md")):
        wide = [line for line in page.read_text().splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
        assert not wide, (page.name, wide)


# ---------------------------------------------------------------- in a browser


def check_page(browser, path: Path, width: int) -> None:
    """No complaint in the console, every picture there, nothing wider than the screen."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(path.as_uri())
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0, f"{path.name} is {wide} pixels wider than {width}"
    missing = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert browser.execute_script(missing) == []
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not complaints, complaints
    assert len(browser.find_element("css selector", "article").text) > 100


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_page_in_a_browser(site, browser, name, width):
    check_page(browser, site / f"{name}.html", width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 768, 375])
def test_all_pages_in_a_browser(site, browser, width):
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html" and "source" not in path.relative_to(site).parts:
            check_page(browser, path, width)


def test_the_search_finds_a_page_without_a_network(site, browser):
    """Opened as a file, on a desk."""
    import time

    check_page(browser, site / "index.html", 1280)
    box = browser.find_element("css selector", "input.md-search__input")
    browser.execute_script("arguments[0].focus()", box)
    box.send_keys("memory_budget")
    until = time.time() + 20
    while not browser.find_elements("css selector", ".md-search-result__item"):
        assert time.time() < until, browser.get_log("browser")
        time.sleep(0.1)
