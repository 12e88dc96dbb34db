"""Ranks as forks of a process that has imported what they need: a free port, their places, and the wait for all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


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
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
