"""Ranks as forks of a process that has imported what they need: that process, a free port, their places, and the wait
for all.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Server:
    """A process that has imported what its forks need; :meth:`close` ends it, and so does the end of this one.

    Args:
        code: what it runs, which ends in :func:`answer`.
    """

    def __init__(self, code: str) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", code], **pipes, text=True, env=environ)
        atexit.register(self.process.kill)

    def ask(self, request: Any) -> Any:
        """Its answer; both are what JSON has."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the server of runs has ended; see its output above")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def answer(handle: Callable[[Any], Any], prepare: Callable[[], None] = lambda: None) -> None:
    """Answer the requests of a :class:`Server`, one on a line of standard input, until it ends. What is printed
    meanwhile goes to standard error.

    Args:
        handle: request -> answer.
        prepare: imports what forks need beside what compiling does.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare()
    time_no_guards()
    compile_once()
    leave_imports_alone()
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)


def leave_imports_alone() -> None:
    """Keep the collector of cycles from what this process has imported, a million objects that stay, and have it look
    less often: an eighth of the time of a test that compiles (204 tests of passes and plans, in turn).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 200)


def time_no_guards() -> None:
    """Have Dynamo time the guards of no compilation: it empties the processor's caches for a number in its log, 18 ms
    each time.
    """
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *_: 0.0


def compile_once() -> None:
    """Compile a function for what compiling imports late: half a second of each fork.

    Without gradients: torch for cuda refuses a backward, as a trace of one is, in a fork of a process that ran one.
    """
    import torch
    import torch._functorch.partitioners
    from torch._dynamo.utils import counters

    import mindspeed_fx.backend  # noqa: F401
    import mindspeed_fx.compat.partitioner  # noqa: F401

    torch.set_num_threads(1)
    with torch.random.fork_rng(), torch.no_grad():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
        torch.compile(model, backend="mindspeed", options={"codegen": "eager"})(torch.ones(1, 2))
    torch._dynamo.reset()
    counters.clear()


def search_less() -> None:
    """Let a search for an order of a graph place a tenth of the tasks that it may elsewhere: numbers are the same in
    every order, and the search took a quarter of the time of a rank that compiles.
    """
    from mindspeed_fx.passes.overlap.chunking import chunk_search
    from mindspeed_fx.passes.overlap.scheduler import local_search

    local_search.WORK, chunk_search.SURE = 12_000, 6_000


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(run: Callable[[], int], out: str | Path, err: str | Path | None = None) -> int:
    """Process id of a fork that runs ``run``, writes to the files and ends with the status that ``run`` returns.

    The fork leads a group of processes, which :func:`wait` ends with it. Without ``err`` both streams go to ``out``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output if err is None else os.open(err, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        renew_threads()
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def renew_threads() -> None:
    """A fork makes torch's pool of threads anew when it is first asked for; two threads that ask at once may find none
    ("Invalid thread pool!"), so that it is asked for while there is one.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())


def share_write_results() -> None:
    """Have Megatron's writers of checkpoints tell their results to a fork of this rank.

    Megatron spawns a process for them, which imports the script again, and which a rank that ends at once leaves
    behind.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def take_place(rank: int, world: int, port: int) -> None:
    """Set the environment variables by which torchrun tells a process its rank."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in places.items()}, MASTER_ADDR="127.0.0.1")


def wait(
    pids: list[int], seconds: float, grace: float, stop: Callable[[], bool] = lambda: False
) -> tuple[list[int], bool]:
    """(exit statuses, whether time ran out) of forks; once one fails the others have ``grace`` seconds, as under
    torchrun, then they are killed, as they are at once when ``stop`` is true.
    """
    deadline, late = time.monotonic() + seconds, False
    codes: dict[int, int | None] = dict.fromkeys(pids)
    while waiting := [pid for pid, code in codes.items() if code is None]:
        for pid in waiting:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + grace)
        is_late = time.monotonic() > deadline
        if is_late or stop():
            for pid in (p for p, code in codes.items() if code is None):
                late |= is_late
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [code for code in codes.values() if code is not None], late
