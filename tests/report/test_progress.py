"""Progress by a clock that the test moves, on a terminal that the test reads."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
import threading

import pytest
import torch
from torch import nn

from mindspeed_fx.report import progress


@pytest.fixture
def terminal():
    """(a stream to a terminal, a function that reads what was written to it)."""
    inside, outside = os.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    stream = open(outside, "w", buffering=1)

    def read():
        text = b""
        while select.select([inside], [], [], 0.2)[0]:  # a terminal hands over what is written in parts, a little later
            text += os.read(inside, 1 << 16)
        return text.decode()

    yield stream, read
    stream.close()
    os.close(inside)


def test_nothing_is_drawn_before_its_time_and_nothing_is_left(terminal):
    stream, read = terminal
    seconds = [0.0]
    display = progress.Display(stream, now=lambda: seconds[0])
    display.refresh()
    display.tasks.append(progress.Task("graph 0", progress.COMPILE, "planning", 3, "recompute.budget"))
    seconds[0] = progress.DELAY - 0.1
    display.refresh()
    assert read() == ""
    seconds[0] = progress.DELAY + 1
    display.refresh()
    drawn = read()
    assert "mindspeed-fx 6 s: graph 0: planning (recompute.budget)" in drawn and " 30% |" in drawn
    display.close()
    assert re.sub(r"[\r\n ]|\x1b\[A", "", read()) == ""  # the line is cleared
    display.refresh()
    assert read() == ""


def test_a_task_within_another_is_part_of_its_stage(terminal):
    display = progress.Display(terminal[0], now=lambda: 0.0)
    assert display.share == 0
    display.tasks = [progress.Task("measure", ("compiled", "rounds"), "compiled", 0)]
    assert display.share == 0
    display.tasks.append(progress.Task("graph 0", ("a", "b", "c", "d"), "c", 2, "x", 0.5))
    assert display.share == pytest.approx((2 + 0.5) / 4 / 2)
    display.tasks = [progress.Task("plan", (), "model", 3, "", 1.0)]
    assert display.share == 1


@pytest.mark.parametrize("where", ["log", "another rank", "no tqdm"])
def test_elsewhere_nothing_starts(where, terminal, monkeypatch, tmp_path):
    monkeypatch.setattr(progress.sys, "stderr", terminal[0])
    assert progress.is_shown()
    if where == "log":
        monkeypatch.setattr(progress.sys, "stderr", open(tmp_path / "log", "w"))
    elif where == "another rank":
        monkeypatch.setenv("RANK", "1")
    else:
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    threads = threading.active_count()
    monkeypatch.setattr(progress, "Display", None)  # making one would fail
    with progress.task("plan", ("model",)):
        progress.enter("model")
        progress.note("layers", 1, 2)
        assert progress._display is None and threading.active_count() == threads


def test_stages_and_errors_of_tasks(terminal, monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", terminal[0])
    with pytest.raises(KeyError), progress.task("measure", ("compiled", "rounds")):
        display = progress._display
        progress.enter("rounds")
        progress.note("3 of 4", 3, 4)
        assert display.tasks[0].text == "measure: rounds (3 of 4)" and display.share == (1 + 3 / 4) / 2
        with progress.task("graph 0", ("capture",)):
            progress.enter("not of its stages")
            assert [t.text for t in display.tasks][1] == "graph 0: not of its stages"
        assert len(display.tasks) == 1
        raise KeyError
    assert progress._display is None and display.is_over.is_set()


def test_a_compilation_shows_its_stages(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    seen = []
    entered = progress.enter

    def enter(stage):
        entered(stage)
        seen.append((stage, progress._display.tasks[-1].position))
        progress._display.refresh()

    monkeypatch.setattr(progress, "enter", enter)
    torch._dynamo.reset()
    compiled = torch.compile(nn.RMSNorm(8), backend="mindspeed", options={"codegen": "eager"})
    compiled(torch.randn(2, 8)).sum().backward()
    assert [stage for stage, _ in seen] == list(progress.COMPILE)
    assert [position for _, position in seen] == list(range(len(progress.COMPILE)))
    drawn = read()
    assert "captured passes" in drawn and "backward lowering" in drawn
    assert progress._display is None
