"""What is promised about installing: every Python that pyproject.toml names can resolve the pins, and every extra is
explained.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PROJECT = (ROOT / "pyproject.toml").read_text()


def pinned(python: str) -> dict[str, list[str]]:
    """Package -> versions that hold for one Python."""
    requirements = pytest.importorskip("packaging.requirements")
    out: dict[str, list[str]] = {}
    for line in PINS:
        r = requirements.Requirement(line)
        if r.marker is None or r.marker.evaluate({"python_version": python, "python_full_version": python + ".0"}):
            out.setdefault(re.sub(r"[-_.]+", "-", r.name).lower(), []).append(str(r.specifier))
    return out


@pytest.mark.parametrize("python", re.findall(r"Python :: (3\.\d+)", PROJECT))
def test_every_package_has_one_exact_pin(python):
    for name, versions in pinned(python).items():
        assert len(versions) == 1 and re.fullmatch(r"==[\w.!]+", versions[0]), (name, versions)


def test_a_marker_hides_no_package_from_a_newer_python():
    """Only backports, and what older releases need, are pinned for Python 3.10 alone."""
    assert set(pinned("3.11")) == set(pinned("3.13")) and set(pinned("3.11")) <= set(pinned("3.10"))
    assert set(pinned("3.10")) - set(pinned("3.11")) == {"exceptiongroup", "pytz", "tomli"}


def test_pins_without_a_marker_install_on_the_oldest_python():
    """The pinned releases of these need Python 3.11: each comes in a pair."""
    old, new = pinned("3.10"), pinned("3.11")
    assert {n for n in new if old[n] != new[n]} >= {
        "numpy",
        "scipy",
        "networkx",
        "matplotlib",
        "pandas",
        "pillow",
        "transformers",
        "hypothesis",
        "filelock",
        "contourpy",
        "regex",
    }


def test_torch_stands_on_a_line_of_its_own():
    """The Makefile reads it with grep."""
    assert len([p for p in PINS if re.match(r"torch==[\d.]+$", p)]) == 1


def test_readme_names_every_extra():
    extras = re.findall(r"^(\w+) = \[", PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M)
    line = re.search(r"pip install mindspeed-fx .*", (ROOT / "README.md").read_text())[0]
    assert len(extras) >= 7 and not [e for e in extras if not re.search(rf"\b{e}\b", line)]


def test_the_licence_is_the_one_that_is_declared():
    assert 'license = "Apache-2.0"' in PROJECT
    text = (ROOT / "LICENSE").read_text()
    assert (
        "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text and len(text.splitlines()) > 195
    )


def test_printed_results_name_no_path_of_a_machine():
    found = [
        (f.name, hit[0])
        for f in sorted((ROOT / "benchmarks" / "results").glob("*.txt"))
        if (hit := re.search(r"(file://|(?<![\w.])/(root|home|opt|tmp|work)/)\S*", f.read_text()))
    ]
    assert not found, found


def test_readme_shows_how_several_processes_are_started():
    assert re.search(
        r"^\.venv/bin/torchrun .*examples/pretrain_gpt\.py .*--tensor-model-parallel-size 2",
        (ROOT / "README.md").read_text(),
        re.M,
    )
