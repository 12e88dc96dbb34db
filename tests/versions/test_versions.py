"""The command for other versions: names, constraints, counts and reasons; no environment is made here."""

from __future__ import annotations

import pytest

from tests.versions import __main__ as command
from tests.versions.environments import MATRIX, ROOT, Missing, Versions, constraints, interpreter

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"><failure/></testcase>
<testcase classname="tests.b" name="three"><skipped/></testcase>
<testcase classname="tests.b" name="four"><error/></testcase>
</testsuite></testsuites>"""
OK = command.Row("mine", passed=1)


def test_names_are_told_apart_and_listed(capsys):
    assert len({v.name for v in MATRIX}) == len(MATRIX)
    assert command.main(["--list", "--only", "py3.11-torch2.11.0"]) == 0
    assert capsys.readouterr().out == "py3.11-torch2.11.0\n"
    with pytest.raises(SystemExit):
        command.main(["--only", "py3.11-torch9"])


def test_tests_may_follow_the_name(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(command, "run", lambda versions, folder, tests: runs.append((versions.name, tests)) or OK)
    assert command.main(["--only", "py3.12", "--only", "py3.13", "tests/compat", "--folder", str(tmp_path)]) == 0
    assert runs == [("py3.12", ["tests/compat"]), ("py3.13", ["tests/compat"])]


def test_constraints_give_way_to_what_is_asked_for():
    text = (ROOT / "constraints.txt").read_text()
    own = constraints(text, Versions("3.11", {"torch": "2.11.0"})).splitlines()
    assert [line for line in own if line.startswith("torch==")] == ["torch==2.11.0"]
    assert len(own) == len(text.splitlines())
    older = constraints(text, Versions("3.11", {"transformers": "4.57.6"}))
    assert "transformers==4.57.6" in older and "huggingface_hub" not in older and "numpy==" in older


def test_a_python_that_is_not_there_is_a_reason(tmp_path):
    with pytest.raises(Missing, match=r"no python9\.9"):
        interpreter("9.9")
    row = command.run(Versions("9.9"), tmp_path, [])
    assert not row.ok and row.note == "no python9.9 on this machine"
    assert row.note in command.table([row])


def test_counts_come_from_the_report(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    row = command.read_report("mine", path, 2.0)
    assert (row.passed, row.failed, row.skipped) == (1, 2, 1)
    assert row.failures == ("tests.a::two", "tests.b::four") and not row.ok
    assert command.read_report("mine", tmp_path / "none.xml", 0.0).note == "pytest did not run"
