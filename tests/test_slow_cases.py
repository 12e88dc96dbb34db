"""The list of slow cases names tests that exist, and is made of what a run says."""

from __future__ import annotations

import pathlib
import re

from tests import slow_cases

ROOT = pathlib.Path(__file__).parents[1]


def test_every_line_names_a_test():
    for name in slow_cases.read():
        path, _, function = name.partition("[")[0].partition("::")
        source = (ROOT / path).read_text()
        assert re.search(rf"^def {re.escape(function)}\(", source, re.MULTILINE), name


def test_the_cheapest_case_of_each_function_stays(tmp_path, monkeypatch):
    log = tmp_path / "suite.log"
    lines = [
        "4.00s call     tests/a.py::test_x[one]",
        "9.00s setup    tests/a.py::test_x[two]",
        "5.00s call     tests/a.py::test_x[two]",
        "0.50s call     tests/a.py::test_y[0]",
        "2.00s call     tests/a.py::test_y[1]",
        "99.0s call     tests/a.py::test_z",
        "7.00s call     tests/docs/a.py::test_p[1]",
        "8.00s call     tests/docs/a.py::test_p[2]",
    ]
    log.write_text("\n".join(lines))
    monkeypatch.setattr(slow_cases, "FILE", tmp_path / "cases.txt")
    slow_cases.FILE.write_text("# by hand\ntests/b.py::test_whole\ntests/c.py::test_out[3]\n")
    slow_cases.main(str(log))
    assert slow_cases.read() == {"tests/b.py::test_whole", "tests/c.py::test_out[3]", "tests/a.py::test_x[two]"}


def test_what_it_names_is_marked():
    class Item:
        def __init__(self, nodeid):
            self.nodeid, self.marks = nodeid, []

        def add_marker(self, mark):
            self.marks.append(mark.name)

    whole = next(n for n in sorted(slow_cases.read()) if "[" not in n)
    case = next(n for n in sorted(slow_cases.read()) if "[" in n)
    items = [
        Item(whole),
        Item(whole + "[a]"),
        Item(case),
        Item("tests/test_slow_cases.py::test_what_it_names_is_marked"),
    ]
    slow_cases.mark(items)
    assert [i.marks for i in items] == [["slow"], ["slow"], ["slow"], []]
