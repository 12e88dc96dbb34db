"""Two calls that take turns: where one waits for a message, the other goes on.

The forward of one micro-batch runs beside the backward of another, so that the experts' exchanges of one are on their
way while the other computes (DeepSeek-V3's DualPipe, arXiv 2412.19437, section 3.2.1). Graphs of marked parameters
(:func:`mark`) hand over before waits for collectives; :func:`run` has the two calls run so. One of them runs at a
time, and it hands over after as many waits on every rank, so that ranks which run the same two calls start their
collectives in the same order. On an accelerator a wait is the stream's: the kernels of the other call are launched
before it.

    forward    attention  start a | .. experts    | .. finish
    backward             | start b  .. experts'   | ..
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.errors import OptionError
from mindspeed_fx.graph.collectives import WAIT
from mindspeed_fx.graph.recompile import recompile

KEY = "_mindspeed_fx_takes_turns"
_pair: "_Pair | None" = None
"""The two calls that run now."""


class _Abandoned(BaseException):
    """Ends the second call where the first has failed."""


class _Pair:
    """Who runs.

    Args:
        random: gets and sets the states of random numbers: each call has its own.
    """

    def __init__(self, random: tuple[Callable[[], Any], Callable[[Any], None]] | None) -> None:
        self.running, self.ended, self.is_abandoned = 0, [False, False], False
        self.locks = [threading.Semaphore(0), threading.Semaphore(0)]
        self.random, self.states = random, [None, None] if random is None else [random[0]()] * 2

    def hand_over(self) -> None:
        """The other call runs until it hands over, or ends; at once where it has ended."""
        me, other = self.running, 1 - self.running
        if self.ended[other]:
            return
        self._switch(me, other)
        self.locks[other].release()
        self.locks[me].acquire()
        if self.is_abandoned:
            raise _Abandoned

    def end(self, me: int) -> None:
        """``me`` has ended: the other runs to its own end."""
        self.ended[me] = True
        if not self.ended[1 - me]:
            self._switch(me, 1 - me)
            self.locks[1 - me].release()

    def _switch(self, me: int, other: int) -> None:
        if self.random is not None:
            self.states[me] = self.random[0]()
            self.random[1](self.states[other])
        self.running = other


def hand_over() -> None:
    """The other of two calls goes on; nothing where there are not two."""
    if _pair is not None:
        _pair.hand_over()


def run(
    first: Callable[[], Any],
    second: Callable[[], Any],
    random: tuple[Callable[[], Any], Callable[[Any], None]] | None = None,
    second_begins: bool = False,
) -> tuple[Any, Any]:
    """What both return; ``first`` runs in this thread, and begins but where ``second_begins``.

    Args:
        random: gets and sets the states of random numbers, where the calls draw some: those of ``first`` remain.

    Raises:
        RuntimeError: two calls take turns already.
    """
    global _pair
    if _pair is not None:
        raise RuntimeError("two calls take turns already")
    pair = _pair = _Pair(random)
    results: list[Any] = [None, None]
    failures: list[BaseException] = []

    def call_second() -> None:
        pair.locks[1].acquire()
        try:
            if not pair.is_abandoned:
                results[1] = second()
        except _Abandoned:
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            pair.end(1)

    thread = threading.Thread(target=_as_here(call_second), name="mindspeed_fx second call")
    thread.start()
    try:
        if second_begins:
            pair.hand_over()
        results[0] = first()
        _finish(pair)
    except BaseException:
        pair.is_abandoned = True
        pair.locks[1].release()
        raise
    finally:
        thread.join()
        _pair = None
        if random is not None:
            random[1](pair.states[0])
    if failures:
        raise failures[0]
    return results[0], results[1]


def _finish(pair: _Pair) -> None:
    """The first has ended: the second runs to its end."""
    if pair.random is not None:
        pair.states[0] = pair.random[0]()
    pair.end(0)


def _as_here(call: Callable[[], None]) -> Callable[[], None]:
    """``call`` on this thread's device and stream, and with its gradient mode."""
    enabled, kind = torch.is_grad_enabled(), None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        kind = getattr(torch, accelerator.type)
        device, stream = kind.current_device(), kind.current_stream()

    def call_as_here() -> None:
        with contextlib.ExitStack() as stack:
            if kind is not None:
                kind.set_device(device)
                stack.enter_context(kind.stream(stream))
            stack.enter_context(torch.set_grad_enabled(enabled))
            call()

    return call_as_here


def mark(parameters: Iterable[Tensor]) -> None:
    """Have the graphs of these parameters hand over before their waits."""
    for parameter in parameters:
        setattr(parameter, KEY, True)


def take(inputs: Sequence[Any], codegen: str) -> bool:
    """Whether a parameter among the inputs of a graph is marked.

    Raises:
        OptionError: one is, and ``codegen`` writes code that cannot hand over.
    """
    is_marked = any(hasattr(x, KEY) for x in inputs)
    if is_marked and codegen != "eager":
        raise OptionError(
            f'option "codegen" is "{codegen}"; valid where a forward runs beside a backward (--moe-fb-overlap): "eager"'
        )
    return is_marked


def insert(gm: fx.GraphModule) -> None:
    """Hand over before each wait for a collective of a graph, in place, that started since it last handed over: the
    other call's messages started after the earlier ones, and arrive after them.
    """
    for node in _waits(gm.graph):
        with gm.graph.inserting_before(node):
            gm.graph.call_function(hand_over).meta["val"] = None
    recompile(gm)


def _waits(graph: fx.Graph) -> Iterator[fx.Node]:
    started: set[Any] = set()
    for node in list(graph.nodes):
        if node.target is not WAIT:
            started.add(node)
        elif node.args[0] in started:
            started.clear()
            yield node
