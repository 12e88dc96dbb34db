"""Faults are what they are called, leave valid Python, and are killed by the tests that execute them alone."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest

from tests.mutants import sample, table
from tests.mutants.campaign import Result
from tests.mutants.faults import find_faults, is_another_program, plant
from tests.mutants.kinds import KINDS
from tests.mutants.tree import Tree

ROOT = pathlib.Path(__file__).parents[2]

REPLACED = [
    ("sign", "y = a - b", ["y = (a + b)"]),
    ("sign", "y = 2 * a + b", ["y = (2 * a - b)"]),
    ("sign", "y = names + words", []),
    ("sign", "y = f(-x, -1)", ["y = f(x, -1)"]),
    ("axis", "y = x.sum(dim=-1)", ["y = x.sum(dim=-2)"]),
    ("axis", "n = x.shape[0]", ["n = x.shape[1]"]),
    ("axis", "y = x.unsqueeze(1)", ["y = x.unsqueeze(0)"]),
    ("axis", "n = sum(xs, 0)", []),
    ("edge", "m = q >= k", ["m = (q > k)"]),
    ("edge", "m = x.tril()", ["m = x.tril(diagonal=1)"]),
    ("comparison", "m = a is None and b", ["m = (a is None or b)", "m = (a is not None) and b"]),
    ("dtype", "y = x.to(torch.float32)", ["y = x.to(torch.bfloat16)"]),
    ("dtype", "y = (a + b).float() * c", ["y = (a + b) * c"]),
    ("gradient", "def backward(ctx, g):\n    return g * 2, None", ["def backward(ctx, g):\n    return None, None"]),
    ("gradient", "def backward(g):\n    return g", ["def backward(g):\n    return (g * 0)"]),
    ("gradient", "def forward(g):\n    return g, g", []),
    ("operands", "y = a / b", ["y = (b / a)"]),
    ("operands", "y = where(m, a, b)", ["y = where(a, m, b)"]),
    ("operands", "y = max(a, b)", []),
    ("plan", "y = x[1:] + [n - 1]", ["y = x[2:] + [n - 1]", "y = x[1:] + [n - 2]"]),
    ("plan", "for i in range(n): pass", ["for i in range((n - 1)): pass"]),
    ("wait", "y = c10d.wait_tensor(x)", ["y = x"]),
    ("wait", "work.wait()", ["pass"]),
    ("alias", "y = x.clone()", ["y = x"]),
    ("alias", "y = [*x]", ["y = x"]),
    ("alias", "seen.update(x)", ["pass"]),
    ("sign", "s = '\u00e4\u20ac' + f('\u00e4', a - b)", ["s = '\u00e4\u20ac' + f('\u00e4', (a + b))"]),
    ("sign", "y = f(\n    a\n    - b,\n    c\n)", ["y = f(\n    (a + b),\n    c\n)"]),
    ("sign", "raise ValueError(a - b)", []),
    ("sign", "if TYPE_CHECKING:\n    y = a - b", []),
]
"""Kind, source, and the source with each fault of that kind, as a file where plans are made."""


@pytest.mark.parametrize("kind, source, mutants", REPLACED, ids=[f"{k}-{n}" for n, (k, _, _) in enumerate(REPLACED)])
def test_a_fault_replaces_what_its_kind_says(kind, source, mutants):
    faults = [f for f in find_faults("planning/x.py", source) if f.kind == kind]
    assert sorted(plant(source, f) for f in faults) == sorted(mutants)
    for fault in faults:
        assert is_another_program(source, fault)


def test_plans_have_plans_faults_alone():
    assert not [f for f in find_faults("kernels/x.py", "y = x[1:]") if f.kind == "plan"]


def test_a_name_stays_when_lines_move_and_tells_equal_places_apart():
    source = "def f(a, b):\n    x = a - b\n    return x, a - b\n"
    names = [f.name for f in find_faults("x.py", source) if f.kind == "sign"]
    assert names == ["sign x.py::f: a - b -> (a + b)", "sign x.py::f: a - b -> (a + b) (2)"]
    assert names == [f.name for f in find_faults("x.py", f"import os\n\n{source}") if f.kind == "sign"]


def test_what_is_chosen_stays_when_other_files_change(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("".join(f"def {name}{i}(x, y):\n    return x - y\n" for i in range(20)))
    before = sample.choose(tmp_path, sample.faults_of(tmp_path, ["."]), 10, seed=22)
    (tmp_path / "b.py").unlink()
    after = sample.choose(tmp_path, sample.faults_of(tmp_path, ["."]), 10, seed=22)
    kept = [f.name for f in before if f.file == "a.py"]
    assert 0 < len(kept) < 10 and set(kept) <= {f.name for f in after}


@pytest.mark.parametrize(
    "rooms", [("partition", "sharding/spmd"), pytest.param(sample.ROOMS, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_a_seed_chooses_the_same_faults_and_every_kind(rooms):
    package = ROOT / "mindspeed_fx"
    faults = sample.faults_of(package, rooms)
    chosen = sample.choose(package, faults, 60, seed=22)
    assert chosen == sample.choose(package, faults, 60, seed=22)
    assert chosen != sample.choose(package, faults, 60, seed=23)
    assert {f.kind for f in chosen} == set(KINDS)
    assert len({f.name for f in faults}) == len(faults)
    for fault in chosen:
        source = (package / fault.file).read_text()
        assert ast.dump(ast.parse(plant(source, fault))) != ast.dump(ast.parse(source))


def test_nothing_is_planted_in_what_is_left_out():
    files = sample.files_of(ROOT / "mindspeed_fx")
    assert not [f for f in files if f.startswith("kernels/triton/") or f.endswith("_svg.py")]
    assert {f.partition("/")[0] for f in files} == set(sample.ROOMS)
    assert all(list((ROOT / "mindspeed_fx").glob(f"{folder}*")) for folder in sample.LEFT_OUT)


def test_a_room_may_be_a_file():
    package = ROOT / "mindspeed_fx"
    rooms = ("cost/operators.py", "kernels/triton/rms_norm.py", "partition")
    files = sample.files_of(package, rooms)
    assert {f for f in files if not f.startswith("partition/")} == {"cost/operators.py"} < files.keys()
    assert {f.file for f in sample.faults_of(package, rooms[:1])} == {"cost/operators.py"}


TINY = '''"""A package of its own."""


def difference(a, b):
    return a - b


def clip(n, most):
    return most if n > most else n


def countdown(n):
    while n > 0:
        n = n - 2
        n = n + 1
    return n


def unused(a, b):
    return a - b
'''

TESTS = """
import pytest
import tiny

@pytest.mark.parametrize("a", [3, 5])
def test_difference(a):
    assert tiny.difference(a, 3) == a - 3

def test_clip():
    assert [tiny.clip(n, 2) for n in (1, 2, 3)] == [1, 2, 2]

def test_countdown():
    assert tiny.countdown(3) == 0

def test_that_fails():
    assert tiny.difference(1, 1) == 1
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Root of a small checkout, whose tests were recorded and all whose mutants ran."""
    root = tmp_path_factory.mktemp("tiny")
    for name, text in (
        ("tiny/__init__.py", TINY),
        ("tests/test_tiny.py", TESTS),
        ("pytest.ini", "[pytest]\nmarkers = slow\n cuda\n"),
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    assert "failed tests/test_tiny.py 5 tests" in command(root, "record")
    package = root / "build/mutants/copy/tiny"
    chosen = sample.choose(package, sample.faults_of(package, ["."]), 300, 22)
    endless = next(n for n, fault in enumerate(chosen) if fault.name.endswith(ENDLESS))
    command(root, "run", str(endless), limit=1)
    command(root, "run")
    return root


ENDLESS = "countdown: n - 2 -> (n + 2)"


def command(root: pathlib.Path, *arguments: str, code: int = 0, limit: int = 60) -> str:
    """``limit`` is what a loaded machine needs; the one that never ends has a shorter one."""
    fixed = ["--root", str(root), "--package", "tiny", "--rooms", ".", "--limit", str(limit)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *arguments, *fixed, "--warm"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(root: pathlib.Path) -> dict[str, dict]:
    lines = (root / "benchmarks/results/mutants.jsonl").read_text().splitlines()
    return {r["name"].replace("__init__.py::", ""): r for r in map(json.loads, lines)}


def test_the_tests_that_execute_a_fault_kill_it(tiny):
    killed = results(tiny)["sign difference: a - b -> (a + b)"]
    assert (killed["status"], killed["ran"]) == ("killed", 1)
    assert killed["test"].startswith("tests/test_tiny.py::test_difference[")
    assert "assert" in killed["message"]
    assert results(tiny)["operands difference: a - b -> (b - a)"]["test"].endswith("test_difference[5]")


def test_an_equivalent_one_survives_all_its_tests(tiny):
    survivor = results(tiny)["edge clip: n > most -> (n >= most)"]
    assert (survivor["status"], survivor["ran"], survivor["test"]) == ("survived", 1, "")


def test_a_loop_without_end_is_not_finished_and_not_killed(tiny):
    endless = results(tiny)[f"sign {ENDLESS}"]
    assert (endless["status"], endless["test"]) == ("not finished", "")
    assert 1 <= endless["seconds"] < 60


def test_what_no_test_executes_is_said(tiny):
    assert results(tiny)["sign unused: a - b -> (a + b)"]["status"] == "not executed"


def test_a_test_that_fails_without_a_fault_kills_nothing(tiny):
    kept = json.loads((tiny / "build/mutants/recording/tests+test_tiny.json").read_text())
    assert kept["not_passed"] == ["tests/test_tiny.py::test_that_fails"]
    assert len(kept["seconds"]) == 4


def test_the_checkout_and_the_copy_are_left_as_they_were(tiny):
    assert (tiny / "tiny/__init__.py").read_text() == TINY
    assert (tiny / "build/mutants/copy/tiny/__init__.py").read_text() == TINY


def test_a_run_goes_on_where_it_was(tiny):
    assert not [line for line in command(tiny, "run").splitlines() if "not executed" not in line]
    again = command(tiny, "run", "0").split()
    assert again[:1] == ["0"]


def test_a_package_that_changed_is_refused(tiny, tmp_path):
    tree = Tree(tiny, "tiny", tiny / "build/mutants")
    assert not tree.changed()
    (tiny / "tiny/more.py").write_text("")
    try:
        with pytest.raises(SystemExit, match="tiny/more.py: changed since .* `--anew` records it all anew"):
            tree.make()
    finally:
        (tiny / "tiny/more.py").unlink()


def test_the_page_counts_by_kind_and_names_survivors(tiny):
    text = command(tiny, "table")
    assert "## Survivors" in text and "`edge __init__.py::clip: n > most -> (n >= most)`" in text
    assert "| all |" in text and "1 did not finish in time" in text


def test_a_survivor_with_a_reason_is_equivalent():
    reasons = table.reasons("# why\nedge a: x\n    one\n    two\n")
    assert reasons == {"edge a: x": "one two"}
    results = {n: Result(n, "edge", "a", 1, s) for n, s in (("edge a: x", "survived"), ("edge a: y", "killed"))}
    text = table.page([(n, "edge") for n in results], results, reasons, "Run on")
    assert "1 were killed (100.0 %). 1 are equivalent" in text and "one two" in text


def test_reasons_are_of_faults_that_there_are():
    reasons = table.reasons(table.REASONS.read_text())
    files = {n.split(" ", 1)[1].partition("::")[0] for n in reasons}
    names = {f.name for file in files for f in find_faults(file, (ROOT / "mindspeed_fx" / file).read_text())}
    assert len(files) > 10 and not [n for n in reasons if n not in names]
