"""Run torch's own tests with this backend in place of Inductor and aot_eager, and say which pass there and not here.

    python -m tests.torch_suites.suite TORCH_SRC [test/dynamo/test_repros.py ...] [--levels 2 1 0] [--everywhere]
    python -m tests.torch_suites.suite tests/torch_suites/installed operators.py modules.py

``TORCH_SRC`` is a checkout of torch's source of the installed version, or the folder beside this file with what the
installed torch brings. Every file runs in a process of its own, one at
a time, with ours at each level, and what fails then again with torch's backends; a test that ends its process, or takes
longer than ``--limit`` seconds, costs only itself. Only tests that reach a backend count; one that fails where it asks
for Inductor's code or counters is counted apart, whatever it asked before. What is known to differ, and
why, is in ``suite_exceptions.txt``; the exit status is 1 where anything else passes with torch's backends and not here.
Results stay in ``--out``, one line of JSON a test; a run that was broken off goes on from there.
"""

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

FILES = (
    "test/inductor/test_compiled_optimizers.py",
    "test/inductor/test_torchinductor.py",
    "test/inductor/test_torchinductor_dynamic_shapes.py",
    "test/dynamo/test_misc.py",
    "test/dynamo/test_functions.py",
    "test/dynamo/test_modules.py",
    "test/dynamo/test_subclasses.py",
    "test/dynamo/test_aot_autograd.py",
    "test/dynamo/test_repros.py",
    "test/dynamo/test_activation_checkpointing.py",
    "test/functorch/test_aotdispatch.py",
    "test/functorch/test_control_flow.py",
    "test/dynamo/test_higher_order_ops.py",
    "test/dynamo/test_hooks.py",
    "test/dynamo/test_autograd_function.py",
    "test/dynamo/test_ctx_manager.py",
    "test/dynamo/test_subgraphs.py",
    "test/dynamo/test_unspec.py",
    "test/dynamo/test_modes.py",
    "test/dynamo/test_recompiles.py",
    "test/higher_order_ops/test_invoke_subgraph.py",
    "test/higher_order_ops/test_with_effects.py",
    "test/distributed/tensor/test_dtensor_compile.py",
)
EXCEPTIONS = Path(__file__).with_name("suite_exceptions.txt")
SHARE = 0.01
"""How many of the tests that pass with torch's backends may be exceptions."""

INDUCTORS_OWN = re.compile(
    r"run_and_get|get_code|stripped_kernels|kernel_count|metrics\.|counters\[|FileCheck|\bcodes?\d?\b|_code\b|code_\w*\b"
)
"""What a statement names that asks for Inductor's generated code or counters, or for the text of a graph."""
CHECKERS = (
    "/unittest/",
    "/torch/testing/",
    "/torch/_dynamo/test_case.py",
    "/torch/_inductor/utils.py",
)
"""Files in which a check that a test makes of a result fails, and nothing that was compiled."""


def main():
    arguments, exceptions = read_arguments(), read_exceptions()
    ran = excused = defects = 0
    for file in arguments.files or FILES:
        if not (Path(arguments.source) / file).exists():
            print(f"{file}: not in {arguments.source}")
            continue
        wanted = None
        for level in arguments.levels:
            here = run_file(arguments, file, str(level), wanted)
            wanted = [t for t, entry in here.items() if reached(entry)]
            failed = [t for t in wanted if here[t].get("status") not in ("pass", "skip", "xfail")]
            theirs = run_file(arguments, file, f"original-{level}", failed) if failed else {}
            worse = sorted(t for t in failed if theirs.get(t, {}).get("status") == "pass")
            own = [t for t in worse if asks_inductor(here[t])]
            worse = [t for t in worse if t not in own]
            new = [t for t in worse if f"{file} {t}" not in exceptions]
            ran, excused, defects = ran + len(wanted), excused + len(worse) - len(new), defects + len(new)
            print(
                f"{file}, level {level}: of {len(here)} tests {len(wanted)} reach a backend, {len(failed)} fail, of "
                f"these {len(failed) - len(worse) - len(own)} with torch's backends too, {len(own)} ask for Inductor's "
                f"code or counters, {len(worse) - len(new)} are exceptions"
            )
            for test in new:
                print(f"  {test}: {describe(here[test])}", flush=True)
    print(f"{ran} tests at all levels, {defects} fail here alone, {excused} are exceptions")
    if excused > SHARE * ran:
        print(f"more than {SHARE:.0%} are exceptions")
    sys.exit(defects > 0 or excused > SHARE * ran)


def reached(entry):
    """Whether a test gave a graph to a backend, or did not end."""
    return entry.get("reached", 1) > 0


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="TORCH_SRC")
    parser.add_argument("files", nargs="*", help="below TORCH_SRC; all of the list without")
    parser.add_argument("--levels", nargs="+", type=int, default=[2, 1, 0])
    parser.add_argument("--codegen", default="eager")
    parser.add_argument("--everywhere", action="store_true", help='also where a test says "eager", or counts graphs')
    parser.add_argument("--limit", type=float, default=120, help="seconds a test may take")
    parser.add_argument("--out", default="build/torch_suites")
    return parser.parse_args()


def read_exceptions():
    """{"FILE CLASS.TEST": reason}"""
    lines = [line.split("|", 1) for line in EXCEPTIONS.read_text().splitlines() if line and not line.startswith("#")]
    return {test.strip(): reason.strip() for test, reason in lines}


def run_file(arguments, file, mode, tests):
    """{test: what became of it} of a file, run in as many processes as its tests end before their time; all tests, or
    those of these names."""
    how = f"{mode}{'-everywhere' * arguments.everywhere}-{arguments.codegen}"
    out = Path(arguments.out) / f"{file.replace('/', '.')}.{how}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    root = Path(arguments.source).resolve()
    root = root / "test" if (root / "test").is_dir() else root
    command = [sys.executable, "-m", "tests.torch_suites.suite_worker", str(Path(arguments.source).resolve() / file)]
    command += ["--root", str(root), "--out", str(out), "--mode", mode.split("-")[0], "--codegen", arguments.codegen]
    command += ["--limit", str(arguments.limit)]
    command += ["--everywhere"] if arguments.everywhere else []
    if tests is not None:
        Path(f"{out}.tests").write_text("\n".join(tests))
        command += ["--tests", f"{out}.tests"]
    environment = {**os.environ, "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}
    results, finished = read_results(out)
    while not finished:
        with open(f"{out}.log", "w") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        before, (results, finished) = len(results), read_results(out)
        if not finished and len(results) == before:
            sys.exit(f"{file} cannot be run:\n{Path(f'{out}.log').read_text()[-2000:]}")
    return results


def read_results(out):
    results, finished = {}, False
    if out.exists():
        for entry in map(json.loads, out.read_text().splitlines()):
            finished |= "finished" in entry
            if "test" in entry:
                results[entry["test"]] = entry
    return results, finished


def asks_inductor(entry):
    """Whether what failed is a check of Inductor's code or counters: the statement where the test's own files were left
    for the last time names them, and nothing ran after it but checkers."""
    frames = re.findall(r'^  File "(.+)", line (\d+), in ', entry.get("text", ""), re.MULTILINE)
    while frames and any(part in frames[-1][0] for part in CHECKERS):
        frames.pop()
    return bool(frames) and bool(INDUCTORS_OWN.search(statement_at(frames[-1][0], int(frames[-1][1]))))


def statement_at(file, line):
    """The text of the innermost statement of a file that holds a line, without what is nested in it; "" outside of test
    files."""
    if "/test" not in file or not os.path.exists(file):
        return ""
    holding = [(first, -last) for first, last in statements(file) if first <= line <= last]
    first, last = max(holding, default=(1, 0))
    return "\n".join(Path(file).read_text().splitlines()[first - 1 : -last])


@functools.cache
def statements(file):
    """(first line, last line) of every statement of a file; of one with a body its head."""
    nodes = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.stmt)]
    heads = [node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno for node in nodes]
    return [(node.lineno, max(node.lineno, last)) for node, last in zip(nodes, heads)]


def describe(entry):
    if "status" not in entry:
        return "ended its process, or ran out of its time"
    lines = [line for line in entry["text"].splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith(" ") and "Error" in line.split(":", 1)[0]]
    return f"{entry['status']}: {([*lines[-1:], *errors] or [''])[-1][:200]}"


if __name__ == "__main__":
    main()
