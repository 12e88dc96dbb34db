"""Structured traces (``TORCH_TRACE``), which tlparse reads, and what ``TORCH_LOGS`` names."""

from __future__ import annotations

import os


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
