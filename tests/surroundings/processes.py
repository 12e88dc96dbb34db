"""Forks that check something, and the wait for them, which a hang does not make endless."""

from __future__ import annotations

import os
import signal
import time
import traceback


def fork(check):
    """Process id of a fork that runs ``check``."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        check()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(*pids):
    """Exit statuses of forks, which are 0 where the check held."""
    codes, end = {}, time.monotonic() + 60
    for pid in pids:
        while pid not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = "hangs"
            else:
                time.sleep(0.02)
    return [codes[pid] for pid in pids]
