"""Structured traces (``TORCH_TRACE``), which tlparse reads, and what ``TORCH_LOGS`` names."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Iterator
from unittest import mock


def structured_tracing() -> bool:
    """True when torch writes structured traces (``TORCH_TRACE``), which tlparse reads."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers) and any(
        type(h).__name__ != "LazyTraceHandler" or getattr(h, "root_dir", None) for h in trace_log.handlers
    )


def trace_artifact(name: str, text: str) -> None:
    """Write one text artifact to torch's structured trace."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def named_in_torch_logs() -> set[str]:
    """Names in ``TORCH_LOGS``, without their signs. torch keeps no list of them: a package's name turns on the logs of
    its modules, so that it cannot be told from the log which was named."""
    return {name.strip().lstrip("+-") for name in os.environ.get("TORCH_LOGS", "").split(",")} - {""}


@contextlib.contextmanager
def without_unread_graphs() -> Iterator[None]:
    """Meanwhile AOTAutograd writes its graphs as text where a log or trace takes them, and not for nobody: of 64 layers
    that is 0.9 s. What it keeps in its cache has no text then, for the logs of a later start.
    """
    from torch._functorch._aot_autograd import graph_compile

    silent = {"_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}  # what they return without a log
    logs = [getattr(graph_compile, name, None) for name in ("aot_joint_log", "aot_graphs_log")]
    is_read = structured_tracing() or any(log is None or log.isEnabledFor(logging.INFO) for log in logs)
    with contextlib.ExitStack() as stack:
        for name, result in () if is_read else silent.items():
            if hasattr(graph_compile, name):
                stack.enter_context(mock.patch.object(graph_compile, name, lambda *_, result=result: result))
        yield


@contextlib.contextmanager
def without_unread_details() -> Iterator[None]:
    """Meanwhile Inductor writes a graph as a script, and says what its cache's key is made of, where a log or a trace
    takes it: of 80 layers that are calls of one graph, that is a tenth of what it does for each of them.
    """
    import torch._dynamo.config
    import torch._dynamo.repro.after_aot as after_aot
    from torch._inductor import codecache

    is_read = structured_tracing() or codecache.log.isEnabledFor(logging.DEBUG) or torch._dynamo.config.repro_after
    with contextlib.ExitStack() as stack:
        if not is_read:
            stack.enter_context(mock.patch.object(codecache.FxGraphCachePickler, "debug_lines", lambda *_: []))
            stack.enter_context(mock.patch.object(after_aot, "save_graph_repro", lambda *_, **__: None))
        yield
