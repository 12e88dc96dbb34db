"""Makes a failing case small: fewer outputs, statements, regions and options, as long as it fails alike.

What is tried is text, so that most attempts are no program at all; eager PyTorch says so in a millisecond."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Iterator

import torch

from .collectives import alone
from .generate import Case, Settings
from .oracle import Failure
from .program import Region, Statement, build, inputs_of, load

Judge = Callable[[Case], Failure | None]


def minimize(case: Case, failure: Failure, judge: Judge, seconds: float = 120.0) -> Case:
    """The smallest case reached in that time that ``judge`` finds failing as ``failure`` does."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                return case
            if _runs(smaller) and failure.same_as(_judged(judge, smaller)):
                case, progress = smaller, True
                break
    return case


def _judged(judge: Judge, case: Case) -> Failure | None:
    try:
        return judge(case)
    except Exception:
        return None  # its reference does not run


def _runs(case: Case) -> bool:
    try:
        dtype = getattr(torch, case.settings.dtype)
        with alone():
            space = load(case.program)
            build(space, case.seed, dtype)(*inputs_of(space, case.seed, case.program.sizes[0], dtype))
    except Exception:
        return False
    return True


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less, those that remove most first."""
    program = case.program
    if len(program.returns) > 1:
        for name in program.returns:
            yield _with(case, returns=[name])
    paths = list(_paths(program.body))
    # What is returned becomes an earlier value, and values become inputs: either takes much away at once.
    for path in paths:
        part = _at(program.body, path)
        if isinstance(part, Statement) and part.name and program.returns != [part.name]:
            yield _with(case, returns=[part.name])
    for path in reversed(paths):
        part = _at(program.body, path)
        if isinstance(part, Region):
            yield _unwrapped(case, path)
        elif part.name and part.name not in program.returns:
            yield from _cut(case, path, part)
    for path in reversed(paths):
        yield _dropped(case, path)
    yield from (dataclasses.replace(case, settings=s) for s in _plainer(case.settings))


def _with(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, program=dataclasses.replace(case.program.copy(), **changes).live())


def _paths(body: list, prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for i, part in enumerate(body):
        yield (*prefix, i)
        if isinstance(part, Region):
            yield from _paths(part.body, (*prefix, i))


def _inside(body: list, path: tuple[int, ...]) -> list:
    """The list that holds the part of that path."""
    for i in path[:-1]:
        body = body[i].body
    return body


def _at(body: list, path: tuple[int, ...]):
    return _inside(body, path)[path[-1]]


def _dropped(case: Case, path: tuple[int, ...]) -> Case:
    smaller = case.program.copy()
    body = _inside(smaller.body, path)
    del body[path[-1]]
    return dataclasses.replace(case, program=smaller.live())


def _unwrapped(case: Case, path: tuple[int, ...]) -> Case:
    smaller = case.program.copy()
    body = _inside(smaller.body, path)
    body[path[-1] : path[-1] + 1] = body[path[-1]].body
    return dataclasses.replace(case, program=smaller.live())


def _cut(case: Case, path: tuple[int, ...], part: Statement) -> Iterator[Case]:
    """The value becomes an input of its own, so that what it was computed from can go."""
    dtype, sizes = getattr(torch, case.settings.dtype), case.program.sizes[0]
    try:
        with alone():
            space = load(_with(case, returns=[part.name]).program)
            value = build(space, case.seed, dtype)(*inputs_of(space, case.seed, sizes, dtype))[0]
    except Exception:
        return
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 1:
        return
    names = dict(zip(sizes, ("b", "s")))
    smaller = case.program.copy()
    del _inside(smaller.body, path)[path[-1]]
    smaller.inputs[part.name or ""] = f"torch.randn({', '.join(names.get(n, str(n)) for n in value.shape)})"
    yield dataclasses.replace(case, program=smaller.live())


def _plainer(settings: Settings) -> Iterator[Settings]:
    if settings.calls > 1:
        yield settings.without(calls=settings.calls - 1)
    if settings.dynamic is not False:
        yield settings.without(dynamic=False)
    if settings.dtype != "float64":
        yield settings.without(dtype="float64")
    if settings.grad != "train":
        yield settings.without(grad="train")
    for name in settings.options:
        if name not in ("level", "codegen"):
            yield settings.without(options={k: v for k, v in settings.options.items() if k != name})
    if settings.options["level"] > 0:
        yield settings.without(options={**settings.options, "level": settings.options["level"] - 1})
