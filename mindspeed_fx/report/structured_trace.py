"""The same artifacts for ``TORCH_TRACE`` logs, so that tlparse shows them beside torch's own."""

from __future__ import annotations

from mindspeed_fx.compat import structured_trace
from mindspeed_fx.report.records import GraphRecord


def emit(record: GraphRecord) -> None:
    """One artifact for each pass that changed the graph, and the index; runs already emitted are not repeated."""
    from mindspeed_fx.report.dump import index_text

    done = record.__dict__.setdefault("_emitted", 0)
    for number, run in list(enumerate(record.runs))[done:]:
        if run.report.rewrites and run.after is not None:
            structured_trace.trace_artifact(f"mindspeed_fx_{number:02d}_{run.stage}_{run.report.name}", run.after)
    record._emitted = len(record.runs)
    structured_trace.trace_artifact("mindspeed_fx_index", index_text(record))
