"""The seam between the backend and everything that shows what it did.

The backend calls :func:`begin` for each Dynamo graph and :func:`finish` when it is compiled (again when a backward that
is compiled late adds runs). Dumps, tlparse artifacts and :func:`mindspeed_fx.explain` hang on here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from typing import Any, Iterator, Sequence

import torch

from mindspeed_fx._version import __version__
from mindspeed_fx.compat import bisector, dynamo, inductor, structured_trace
from mindspeed_fx.compat.fake import hint as size_hint
from mindspeed_fx.report.diffs import diff_text, is_changed
from mindspeed_fx.report.records import GraphRecord

log = logging.getLogger("mindspeed_fx")
CODE, DIFFS = "mindspeed_fx.report.code", "mindspeed_fx.report.diffs"
"""Loggers of artifacts: the modules that write them, since TORCH_LOGS knows the names of modules."""
_lock = threading.Lock()
_collectors: list[list[GraphRecord]] = []
_graphs = 0
_modelling = 0


def begin(options: dict[str, Any], effective: dict[str, Any], rank: int) -> GraphRecord:
    """A record for a new graph; its index counts the graphs of the process, or of the innermost :func:`collecting`. The
    effective options are logged once."""
    global _graphs
    _log_once(json.dumps({"mindspeed_fx": __version__, **effective}, default=str))
    with _lock:
        index = len(_collectors[-1]) if _collectors else _graphs
        _graphs += not _collectors
        record = GraphRecord(index, rank, options, effective)
        record.seconds |= {"dynamo": seconds} if (seconds := dynamo.frame_seconds()) else {}
        for collector in _collectors:
            collector.append(record)
    return record


@functools.cache
def _log_once(text: str) -> None:
    log.info("effective options: %s", text)


def discard(record: GraphRecord) -> None:
    """Forget a graph whose compilation was given up: an error, or Dynamo starting over with other symbols."""
    global _graphs
    with _lock:
        _graphs -= not _collectors
        for collector in _collectors:
            if record in collector:
                collector.remove(record)


def finish(record: GraphRecord) -> None:
    """Write what was asked for; may be called more than once for one record."""
    _log_code(record)
    _log_runs(record)
    if record.options.get("dump"):
        from mindspeed_fx.report import dump

        dump.write(record, record.options["dump"])
    if _tracing():
        from mindspeed_fx.report import structured_trace as structured_trace_report

        structured_trace_report.emit(record)


def _log_runs(record: GraphRecord) -> None:
    """What the passes did since the last call: a line by TORCH_LOGS="mindspeed_fx", and with "+mindspeed_fx" one for
    each site and each near miss.
    """
    runs, record.logged = record.runs[record.logged :], len(record.runs)
    if not log.isEnabledFor(logging.INFO) or not runs:
        return
    rewrites = ", ".join(f"{r.report.name} {len(r.report.rewrites)}" for r in runs if r.report.rewrites)
    left = sum(len(r.report.skipped) for r in runs)
    stages = ", ".join(dict.fromkeys(r.stage for r in runs))
    log.info("graph %d (%s): %s; %d near misses", record.index, stages, rewrites or "no rewrites", left)
    for run in runs if log.isEnabledFor(logging.DEBUG) else ():
        for site in run.report.rewrites:
            log.debug("%s: %s at %s", run.report.name, site.operator, site.source or site.module or site.nodes)
        for skip in run.report.skipped:
            log.debug("%s: left alone at %s: %s", run.report.name, skip.source or skip.module, skip.reason)


def _log_code(record: GraphRecord) -> None:
    """Artifacts by their names: TORCH_LOGS="mindspeed_fx.report.code" shows every graph as code, and
    "mindspeed_fx.report.diffs" what each pass changed. The name alone turns one on: it is too long for "mindspeed_fx".
    """
    names = structured_trace.named_in_torch_logs()
    if DIFFS in names:
        for run in record.runs[record.logged :]:
            if is_changed(run):
                head = f"graph {record.index}, {run.stage}, {run.report.name}"
                logging.getLogger(DIFFS).info("%s\n%s", head, diff_text(run))
    if CODE in names:
        stages = list(record.stages.items())
        for stage, text in stages[record.logged_graphs :]:
            logging.getLogger(CODE).info("graph %d, %s\n%s", record.index, stage, text)
        record.logged_graphs = len(stages)


def wants_text(options: dict[str, Any]) -> bool:
    """True when the code before and after each pass must be kept."""
    logged = {CODE, DIFFS} & structured_trace.named_in_torch_logs()
    return bool(options.get("dump")) or collecting_active() or bool(logged) or _tracing()


def collecting_active() -> bool:
    """True inside :func:`collecting`."""
    return bool(_collectors)


def why_uncached(options: Any, is_meta: bool = False) -> list[str]:
    """Why nothing that is compiled now is kept in a cache, nor taken from one; empty where it is."""
    return (
        [f"{k} was asked for" for k in ("dump", "check") if getattr(options, k) not in (None, "off")]
        + ["explain is collecting"] * collecting_active()
        + ["a bisection is running"] * bisector.bisecting()
        + ["gradients are averaged over ranks"] * bool(options.data_parallel)
        + ["parameters step in the backward"] * bool(options.optimizer)
        + ["nothing is generated for the meta device"] * is_meta
    )


@contextlib.contextmanager
def collecting() -> Iterator[list[GraphRecord]]:
    """Collect the records of all graphs compiled within; turns compile caches off, since a hit runs no pass."""
    records: list[GraphRecord] = []
    with _lock:
        _collectors.append(records)
    try:
        yield records
    finally:
        with _lock:
            _collectors.remove(records)


@contextlib.contextmanager
def record_time(record: GraphRecord, name: str) -> Iterator[None]:
    """Add the time spent within to ``record.seconds[name]``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        record.seconds[name] = record.seconds.get(name, 0.0) + time.perf_counter() - start


@contextlib.contextmanager
def record_codegen(record: GraphRecord) -> Iterator[None]:
    """As :func:`record_time` for "codegen", and of that "compilers": waiting for compilers of what was generated."""
    before = inductor.compiler_seconds()
    with record_time(record, "codegen"):
        yield
    if (seconds := inductor.compiler_seconds() - before) > 0:
        record.seconds["compilers"] = record.seconds.get("compilers", 0.0) + seconds


def note_inputs(record: GraphRecord, inputs: Sequence[Any]) -> None:
    """Bytes of what a graph is given."""
    values = {"trainable": 0, "elements": 0, "other": 0}
    for x in (x for x in inputs if isinstance(x, torch.Tensor) and x.layout is torch.strided):
        size = size_hint(x.numel())
        is_trainable = x.requires_grad and x.is_leaf
        values["trainable" if is_trainable else "other"] += size * x.element_size()
        values["elements"] += size * is_trainable
    record.input_bytes = values


@contextlib.contextmanager
def modelling() -> Iterator[list[GraphRecord]]:
    """As :func:`collecting`; and graphs end before code is generated for them: they run operator by operator."""
    global _modelling
    with collecting() as records:
        _modelling += 1
        try:
            yield records
        finally:
            _modelling -= 1


def is_modelling() -> bool:
    """True inside :func:`modelling`."""
    return _modelling > 0


def _tracing() -> bool:
    return structured_trace.structured_tracing()
