"""The same artifacts for ``TORCH_TRACE`` logs: tlparse lists them by their names under each compilation, beside torch's
own."""

from __future__ import annotations

from mindspeed_fx.compat import structured_trace
from mindspeed_fx.report.records import GraphRecord


def emit(record: GraphRecord) -> None:
    """An artifact for each pass that changed the graph (its code, and the difference), for each graph that runs, and
    the index; what was written already is not repeated."""
    from mindspeed_fx.report.diffs import diff_text, is_changed
    from mindspeed_fx.report.dump import index_text

    texts = {f"mindspeed_fx_graph_{stage}": text for stage, text in record.stages.items()}
    for number, run in enumerate(record.runs):
        if is_changed(run):
            name = f"mindspeed_fx_{number:02d}_{run.stage}_{run.report.name}"
            texts |= {name: run.after or "", f"{name}.diff": diff_text(run)}
    texts["mindspeed_fx_index"] = index_text(record)
    for name, text in texts.items():
        if record.traced.get(name) != hash(text):
            record.traced[name] = hash(text)
            structured_trace.trace_artifact(name, text)
