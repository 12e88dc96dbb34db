"""The modelled cost in reports: FLOP, bytes and seconds of each graph, before and after the passes."""

from __future__ import annotations

from typing import Any, Mapping

from mindspeed_fx.report.records import GraphRecord

HEAD = ("graph", "kernels", "GFLOP", "MB", "modelled us", "most time in")
MEANING = {
    "captured": "forward, before the passes",
    "forward": "forward, final",
    "backward": "backward, final",
    "inference": "inference, final",
}


class Modelled:
    """Estimates of the graphs of a report.

    With codegen "inductor" pointwise work is grouped as Inductor would group it, before and after the passes alike;
    with "eager" every operator is a kernel. "captured" is the forward as the model has it; "forward" and "backward" are
    the graphs that run, where operators that have no kernel on the target are made of others again.

    Attributes:
        graphs: the records.
    """

    def __init__(self, graphs: list[GraphRecord]):
        self.graphs = graphs

    def estimate(self, stage: str, graph: int = 0, hardware: str | None = None) -> Any:
        """The :class:`mindspeed_fx.cost.graph.Estimate` of one graph.

        Args:
            stage: "captured" (before the passes), "forward", "backward" or "inference" (final).
            graph: index of the Dynamo graph.
            hardware: another device than the option's.

        Raises:
            KeyError: there is no such graph; the message has those there are.
            OptionError: no such hardware, or none is known.
        """
        record = self.graphs[graph]
        if stage not in record.calls:
            raise KeyError(f'graph {graph} has no stage "{stage}"; it has: {", ".join(record.calls) or "none"}')
        return estimated(record, stage, hardware)

    def expression(self, what: str, names: Mapping[str, int], stage: str | None = None, graph: int = 0) -> Any:
        """A total as a sympy expression in named sizes, such as 24*b*s*h**2: see :meth:`Estimate.expression`.

        Args:
            what: "flops", "bytes" or "vector".
            names: {"b": 2, "s": 512, "h": 1024, "4*h": 4096}: what the sizes of the inputs are called.
            stage: None: forward and backward together, or the inference graph.
        """
        stages = (
            [stage] if stage else [s for s in ("forward", "backward", "inference") if s in self.graphs[graph].calls]
        )
        any_device = _hardware_name(self.graphs[graph]) or "cpu"  # FLOP and bytes are the same on all
        return sum(self.estimate(s, graph, any_device).expression(what, names) for s in stages)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each stage of each graph: graph, stage, kernels, flops, bytes, seconds, network_seconds,
        hardware, fused, notes, operators.
        """
        return [{"graph": g.index, **r} for g in self.graphs for r in modelled_rows(g)]

    def total(self, what: str, *stages: str) -> float:
        """Sum of "flops", "bytes", "seconds" or "kernels" over all graphs; the final graphs where no stage is named."""
        return sum(r[what] for r in self.rows() if r["stage"] in (stages or ("forward", "backward", "inference")))

    def __str__(self) -> str:
        if not any(g.calls for g in self.graphs):
            return ""
        lines = [about(self.graphs[0])]
        for g in self.graphs:
            lines += [
                f"  graph {g.index} {name:<28}{kernels:>6} kernels {flops:>12} GFLOP {moved:>12} MB {us:>12} us"
                for name, kernels, flops, moved, us, _ in map(cells, modelled_rows(g))
            ]
            lines += [f"    {line}" for line in times_from(modelled_rows(g))]
        return "\n".join(lines)


def _hardware_name(record: GraphRecord) -> str | None:
    """The hardware that times are for; None where none is known."""
    name = str(record.effective["hardware"])
    return None if name.startswith("none: ") else name


def estimated(record: GraphRecord, stage: str, hardware: str | None = None) -> Any:
    """See :meth:`Modelled.estimate`."""
    from mindspeed_fx.cost.graph import Estimate
    from mindspeed_fx.cost.hardware import hardware as device
    from mindspeed_fx.errors import OptionError

    name = hardware or _hardware_name(record)
    if name is None:
        raise OptionError(f'option "hardware": {str(record.effective["hardware"]).removeprefix("none: ")}')
    calls, known = record.calls[stage], record.estimates.get(stage)
    if hardware is None and known is not None and known.calls is calls:
        return known
    estimate = Estimate(calls, device(name), record.effective["codegen"] == "inductor", calls.hints)
    if hardware is None:
        record.estimates[stage] = estimate
    return estimate


def estimates(record: GraphRecord, *stages: str) -> dict[str, Any]:
    """Stage -> :class:`mindspeed_fx.cost.graph.Estimate`, of all stages or of these; {} where no hardware is known or
    nothing was kept."""
    wanted = [stage for stage in record.calls if not stages or stage in stages]
    return {} if _hardware_name(record) is None else {stage: estimated(record, stage) for stage in wanted}


def modelled_rows(record: GraphRecord) -> list[dict[str, Any]]:
    """One row for each stage, ready for JSON; [] where no hardware is known or nothing was kept."""
    return [{"stage": s, **e.summary(), "operators": e.by_operator()} for s, e in estimates(record).items()]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of :func:`modelled_rows` as the words of :data:`HEAD`."""
    slow = row["operators"][0] if row["operators"] else None
    return (
        MEANING[row["stage"]],
        str(row["kernels"]),
        f"{row['flops'] / 1e9:,.2f}",
        f"{row['bytes'] / 1e6:,.1f}",
        f"{row['seconds'] * 1e6:,.1f}",
        f"{slow['operator']} ({slow['bound']})" if slow else "",
    )


def times_from(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each measured kernel that times of the final graphs were taken from, and one for the formula."""
    totals: dict[str, list[float]] = {}
    for source in (s for r in rows if r["stage"] != "captured" for s in r["times_from"]):
        calls, seconds = totals.get(source["row"], (0, 0.0))
        totals[source["row"]] = [calls + source["calls"], seconds + source["seconds"]]
    noun = {True: "product or attention", False: "products and attention"}
    return [
        f"{seconds * 1e6:,.1f} us of {calls} {noun[calls == 1]} from: {row}"
        for row, (calls, seconds) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def about(record: GraphRecord) -> str:
    """What the numbers are."""
    if _hardware_name(record) is None:
        return f"cost not modelled: {str(record.effective['hardware']).removeprefix('none: ')}"
    how = (
        "pointwise work grouped as Inductor would"
        if record.effective["codegen"] == "inductor"
        else "a kernel for every operator"
    )
    return f"modelled for {_hardware_name(record)} ({basis(record)}), not measured: {how}, collectives not overlapped"


def basis(record: GraphRecord) -> str:
    """What the constants of the record's hardware stand on; "" where none is known."""
    from mindspeed_fx.cost.hardware import hardware as device

    name = _hardware_name(record)
    return "" if name is None else device(name).basis


def text(record: GraphRecord) -> list[str]:
    """The lines of a Markdown section; [] where nothing was kept."""
    if not record.calls:
        return []
    result = modelled_rows(record)
    notes = dict.fromkeys(n for r in result for n in r["notes"])
    table = (
        ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        + ["| " + " | ".join(cells(r)) + " |" for r in result]
        if result
        else []
    )
    lines = [*times_from(result), *notes]
    return [about(record) + ".", "", *table, *(["", *(f"- {line}" for line in lines)] if lines else [])]
