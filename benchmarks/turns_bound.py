"""How much of a slow link two calls that take turns hide, and the most that any order of their work could.

    python -m benchmarks.turns_bound [--share 0.5] [--layers 2]

The forward and the backward of benchmarks/forward_beside_backward.py run apart once more with their work between
messages noted, in processor time of rank 0, so that other work on the machine does not count; then they are played on
one processor and one link that carries a message after the other. "By turns" is :mod:`mindspeed_fx.training.turns`: who
waits hands over. "Best" is the shortest of all ways to interleave the two lists of messages and work, each of which
keeps its own order: what their independence allows. Exposed: time beyond the work, over the link's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Callable, Sequence

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import common
from benchmarks.forward_beside_backward import build, gather_at_once
from benchmarks.pipe_experts import Wire, install, start_rank


@dataclass(frozen=True)
class Event:
    """Work, and what follows it.

    Args:
        work: seconds before it.
        kind: "start" or "wait" of a message, or "end".
        message: its number.
        size: of a message that starts, bytes.
    """

    work: float
    kind: str
    message: int = 0
    size: int = 0


class Recorder(Wire):
    """A link without delay that notes what a call does between its messages."""

    def begin(self) -> None:
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}
        self.last = time.thread_time()

    def _note(self, kind: str, message: int = 0, size: int = 0) -> None:
        now = time.thread_time()
        self.events.append(Event(now - self.last, kind, message, size))
        self.last = now

    def started(self, tensor, size: int = 0) -> None:
        super().started(tensor, size)
        self.numbers[tensor.data_ptr()] = len(self.events)
        self._note("start", len(self.events), size)

    def waited(self, tensor) -> None:
        super().waited(tensor)
        self._note("wait", self.numbers.pop(tensor.data_ptr()))

    def end(self) -> list[Event]:
        self._note("end")
        return self.events


@dataclass(frozen=True)
class State:
    """Of a processor and a link."""

    now: float = 0.0
    free: float = 0.0
    ends: tuple[tuple[int, int, float], ...] = ()
    """(call, message, when it has arrived)."""

    def after(self, call: int, event: Event, delay: float) -> State:
        now = self.now + event.work
        if event.kind == "start":
            free = max(self.free, now) + delay * event.size
            return State(now, free, (*self.ends, (call, event.message, free)))
        if event.kind == "wait":
            now = max(now, next(end for c, m, end in self.ends if (c, m) == (call, event.message)))
        return State(now, self.free, self.ends)


def by_turns(calls: Sequence[Sequence[Event]], delay: float, always: bool = False) -> float:
    """When both have ended, where the backward begins and who waits for a message of its own turn hands over; or,
    ``always``, the forward, and at every wait."""
    state, at, turn, running, is_new = State(), [0, 0], [0, 0], int(not always), False
    while at[0] < len(calls[0]) or at[1] < len(calls[1]):
        if at[running] == len(calls[running]):
            running, is_new = 1 - running, True
        event, other = calls[running][at[running]], 1 - running
        if (
            event.kind == "wait"
            and not is_new
            and at[other] < len(calls[other])
            and (always or event.message >= turn[running])
        ):
            state = replace(state, now=state.now + event.work)
            calls = [[*c] for c in calls]
            calls[running][at[running]] = replace(event, work=0.0)
            turn[running] = at[running]
            running, is_new = other, True
            continue
        state, is_new = state.after(running, event, delay), False
        at[running] += 1
    return state.now


def at_every_wait(calls: Sequence[Sequence[Event]], delay: float) -> float:
    return by_turns(calls, delay, always=True)


def in_order(calls: Sequence[Sequence[Event]], delay: float) -> float:
    """When both have ended, one after the other."""
    state = State()
    for number, call in enumerate(calls):
        for event in call:
            state = state.after(number, event, delay)
    return state.now


def best(calls: Sequence[Sequence[Event]], delay: float) -> float:
    """The earliest end of both over all interleavings of their events."""
    left = [[sum(e.work for e in call[i:]) for i in range(len(call) + 1)] for call in calls]
    found = by_turns(calls, delay)

    def search(state: State, at: tuple[int, int]) -> None:
        nonlocal found
        if state.now + left[0][at[0]] + left[1][at[1]] >= found - 1e-9:
            return
        if at == (len(calls[0]), len(calls[1])):
            found = state.now
            return
        nexts = [state.after(c, calls[c][at[c]], delay) if at[c] < len(calls[c]) else None for c in (0, 1)]
        for c in sorted((c for c in (0, 1) if nexts[c] is not None), key=lambda c: nexts[c].now):
            search(nexts[c], (at[0] + (c == 0), at[1] + (c == 1)))

    search(State(), (0, 0))
    return found


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    from mindspeed_fx.training import turns

    _, hidden = start_rank(rank, store, args)
    link = Recorder(0.0)
    install(link)
    gather_at_once(link)
    chunk = build(args)
    turns.mark(chunk.parameters())
    chunk.compile(backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)

    def record(call: Callable) -> tuple[list[Event], object]:
        dist.barrier()
        link.begin()
        result = call()
        return link.end(), result

    for _ in range(3):  # the first compiles
        forward, out = record(lambda: chunk(hidden.clone().requires_grad_()))
        loss = out.pow(2).mean()
        backward, _ = record(loss.backward)
    if rank == 0:
        calls = forward, backward
        if args.events:
            for call in calls:
                print(*(f"{e.work * 1e3:.1f} ms, {e.kind} {e.message} ({e.size})" for e in call), sep="\n", end="\n\n")
        work, sent = (sum(getattr(e, what) for call in calls for e in call) for what in ("work", "size"))
        delay = args.share * work / sent
        common.header(
            f"{vars(args)}: {sent / 2**20:.1f} MiB, {work * 1e3:.0f} ms of work, {[len(c) for c in calls]} events"
        )
        exposed = {
            f.__name__: (f(calls, delay) - work) / (delay * sent) for f in (in_order, at_every_wait, by_turns, best)
        }
        for name, share in exposed.items():
            print(f"{name:<15}{share:>8.3f} of the link exposed")
        print(f"by turns hides {(1 - exposed['by_turns']) / (1 - exposed['best']):.3f} of what independent work allows")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = common.arguments(hidden=512, ffn=1024, experts=4, tokens=1024, layers=2, share=0.5, events=0)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(f"{folder}/store", arguments), nprocs=2)
