"""Ranks as forks of a process that has imported what they need: a free port, their places, and the wait for all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork() -> int:
    """``os.fork``; the child leads a group of processes, which :func:`wait` ends with it."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
    return pid


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
