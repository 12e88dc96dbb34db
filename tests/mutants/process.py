"""Tests run in a fork of a process that has imported torch, and nothing of the package: seconds less a mutant."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Sequence

import pytest

WARM = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "torch.testing",
    "transformers.models.llama.modeling_llama",
    "hypothesis",
    "scipy.optimize",
)

ENVIRONMENT = {
    "CI": "1",
    "OMP_NUM_THREADS": "1",
    # what a mutant compiled is not what the next one finds; C++ is found by its text
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


@dataclass
class Outcome:
    """What became of a run: "passed", "failed", "crashed", or "limit" where the time was over before."""

    status: str
    test: str = ""
    message: str = ""
    ran: int = 0
    seconds: float = 0.0


class Watcher:
    """Runs ``tests`` alone, in their order, and writes the first failure down at once, for what comes after it may
    hang."""

    def __init__(self, tests: Sequence[str] | None, file: pathlib.Path):
        self.place = None if tests is None else {test: i for i, test in enumerate(tests)}
        self.file = file
        self.outcome = Outcome("passed")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = self.place
        if place is not None:
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.outcome.ran += report.when == "call"
        self._note(report)

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _note(self, report: Any) -> None:
        if report.failed and self.outcome.status == "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
            self.outcome = Outcome("failed", report.nodeid, text.partition("\n")[0][:200], self.outcome.ran)
            self._write()

    def _write(self) -> None:
        self.file.write_text(json.dumps(asdict(self.outcome)))


def warm(names: Sequence[str] = WARM) -> None:
    """Import what tests need and no fault changes; what is not installed is left to the tests to miss."""
    os.environ.update(ENVIRONMENT)
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            pass


def run_tests(
    copy: pathlib.Path,
    files: Sequence[str],
    tests: Sequence[str] | None,
    folder: pathlib.Path,
    limit: float,
    arguments: Sequence[str] = (),
    plugin: Callable[[], Any] | None = None,
) -> Outcome:
    """Run ``tests`` (None: all) of ``files`` in the tree ``copy``.

    Args:
        folder: where the log, temporary files and the result of the run go.
        limit: seconds, after which the process and what it started are killed.
        arguments: more of pytest's.
        plugin: called in the child before anything of the package is imported; gives another plugin for pytest.
    """
    result = folder / "outcome.json"
    result.unlink(missing_ok=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            code = _child(copy, files, Watcher(tests, result), folder, arguments, plugin)
        except BaseException as error:  # noqa: BLE001  a fork must not come back into its parent's program
            print(repr(error), file=sys.stderr, flush=True)
            code = 70
        os._exit(code)
    code = _wait(child, start + limit)
    outcome = Outcome(**json.loads(result.read_text())) if result.exists() else Outcome("passed")
    outcome.seconds = time.monotonic() - start
    if outcome.status == "passed" and code is None:
        outcome.status = "limit"
    elif outcome.status == "passed" and code not in (0, 5):  # 5: none of the tests is there
        outcome.status, outcome.message = "crashed", f"exit status {code}"
    return outcome


def _child(
    copy: pathlib.Path,
    files: Sequence[str],
    watcher: Watcher,
    folder: pathlib.Path,
    arguments: Sequence[str],
    plugin: Callable[[], Any] | None,
) -> int:
    os.setsid()
    with open(folder / "log.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(copy)))]
    for name in [m for m in sys.modules if m.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this tool's own, of the checkout
    plugins = [watcher, *([plugin()] if plugin else [])]
    here = ["--rootdir", str(copy), "--basetemp", str(folder / "temporary"), "-p", "no:cacheprovider"]
    return int(pytest.main([*here, *arguments, *files], plugins=plugins))


def _wait(child: int, end: float) -> int | None:
    """The exit status; None where the time was over. What the child left running ends with it."""
    code = None
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code is None:
        os.waitpid(child, 0)
    return code
