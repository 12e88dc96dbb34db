"""What cross-compiling found: plain values, as text, JSON or one HTML page. Traced and modelled; nothing ran on an
NPU.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from mindspeed_fx.ascend.text import kernel_text, milliseconds, size
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.cost.training import modelled_step


class CrossReport:
    """The graphs that an NPU would run.

    Attributes:
        values: everything, as JSON has it: soc, model, options, versions, graphs (counts, skipped, lowered, sides with
            operators, memory and code), unfused (the same without any pass), without_gradient, seconds, peak_memory.
    """

    def __init__(self, values: dict[str, Any]):
        self.values = values

    @property
    def soc(self) -> str:
        return self.values["soc"]

    @property
    def hardware(self) -> str:
        """The device of the cost model."""
        return next((s["cost"]["hardware"] for g in self.graphs for s in g["sides"]), self.soc)

    @property
    def graphs(self) -> list[dict[str, Any]]:
        return self.values["graphs"]

    @property
    def counts(self) -> dict[str, int]:
        """Pass name -> rewrites, over all graphs."""
        return _add_rows([g["counts"] for g in self.graphs])

    @property
    def operators(self) -> dict[str, int]:
        """Operator -> calls, over all graphs and both directions, e.g. {"npu.npu_rms_norm": 65}."""
        return _add_rows([{o["operator"]: o["calls"] for o in s["operators"]} for g in self.graphs for s in g["sides"]])

    def costly(self, most: int = 10) -> list[dict[str, Any]]:
        """The operators that take most of the modelled time, over all graphs and both directions: operator, calls,
        flops, bytes, made, seconds.
        """
        rows: dict[str, dict[str, Any]] = {}
        for o in (o for g in self.graphs for s in g["sides"] for o in s["operators"]):
            row = rows.setdefault(
                o["operator"],
                {"operator": o["operator"], **dict.fromkeys(("calls", "flops", "bytes", "made", "seconds"), 0)},
            )
            for key in ("calls", "flops", "bytes", "made", "seconds"):
                row[key] += o[key]
        return sorted((r for r in rows.values() if r["seconds"]), key=lambda r: -r["seconds"])[:most]

    @property
    def lowered(self) -> list[dict[str, Any]]:
        """Fused operators that became a kernel: operator, side, kernel, calls, and why better kernels were refused."""
        return [row for g in self.graphs for row in g["lowered"] if not _by_reference(row)]

    @property
    def unlowered(self) -> list[dict[str, Any]]:
        """Fused operators that the NPU would run as their reference, operator by operator, with the ``reason``."""
        return [
            {**row, "reason": row["reason"] or "it has no npu kernel yet"}
            for g in self.graphs
            for row in g["lowered"]
            if _by_reference(row)
        ]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """Triton kernels compiled for the SoC: operator, in_graph (the graph calls it, and not torch_npu's kernel in
        its place), kernel, tile, outcome, on_chip, dynamic, scalar_loops ...; or operator, in_graph and ``problem``.
        Those of the graph first. ``generated``: made of a region of pointwise operators and row reductions that no
        fused operator took; the graph runs those one by one."""
        rows = []
        for results in sorted(self.values["kernels"]["calls"], key=lambda m: not m["in_graph"]):
            generated = results["operator"].startswith("region of ")
            head = {
                "operator": results["operator"] if generated else f"mindspeed.{results['operator']}",
                "generated": generated,
                "in_graph": results["in_graph"],
            }
            rows += [{**head, **k, "problem": ""} for k in results["kernels"]] or [
                {**head, "problem": results["problem"]}
            ]
        return rows

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """Near misses: pass, reason, module, source."""
        return [row for g in self.graphs for row in g["skipped"]]

    @property
    def without_gradient(self) -> list[str]:
        """Trainable parameters without a gradient: unused by the model, or lost."""
        return self.values["without_gradient"]

    @property
    def code(self) -> dict[str, str]:
        """ "graph0.forward" ... -> readable code of that graph."""
        return {f"graph{i}.{s['side']}": s["code"] for i, g in enumerate(self.graphs) for s in g["sides"]}

    def total(self, what: str, unfused: bool = False) -> float | None:
        """Sum over all graphs: modelled "seconds", "bytes" moved, "flops", "kernels", "nodes", or "saved" bytes; None
        without that baseline.
        """
        values = self.values.get("unfused") if unfused else self.values
        if values is None:
            return None
        if what == "saved":
            return sum(g["saved"] for g in values["graphs"])
        if what == "nodes":
            return sum(s["nodes"] for g in values["graphs"] for s in g["sides"])
        return sum(s["cost"][what] for g in values["graphs"] for s in g["sides"])

    @property
    def basis(self) -> str:
        """What the constants of the modelled device stand on."""
        return device(self.hardware).basis

    def step(self, unfused: bool = False) -> str:
        """The modelled time of the step with the interval in which four of five published runs on such a device are."""
        return modelled_step(device(self.hardware), self.total("seconds", unfused) or 0.0)

    def peak(self, unfused: bool = False) -> int | None:
        """The most bytes alive in any one graph, its inputs (parameters, saved activations) included."""
        values = self.values.get("unfused") if unfused else self.values
        return (
            None
            if values is None
            else max((s["memory"]["peak"] for g in values["graphs"] for s in g["sides"]), default=0)
        )

    def comparison(self) -> list[tuple[str, str, str]]:
        """(what, with the passes, without any pass) as text; empty without a baseline."""
        if not self.values.get("unfused"):
            return []
        rows = [
            ("modelled time of the step", self.total("seconds"), self.total("seconds", True), milliseconds),
            ("kernels started", self.total("kernels"), self.total("kernels", True), str),
            ("bytes moved", self.total("bytes"), self.total("bytes", True), size),
            ("activations saved", self.total("saved"), self.total("saved", True), size),
            ("peak of live memory", self.peak(), self.peak(True), size),
        ]
        return [(what, show(a), show(b)) for what, a, b, show in rows]

    def to_json(self) -> str:
        return json.dumps(self.values, indent=1)

    def save(self, path: str) -> pathlib.Path:
        """Write ``path`` as HTML or, when it ends in .json, as JSON."""
        from mindspeed_fx.ascend.page import page

        written = pathlib.Path(path)
        written.write_text(self.to_json() if written.suffix == ".json" else page(self), encoding="utf-8")
        return written

    def __str__(self) -> str:
        v = self.values
        lines = [
            f"{v['model']} for {self.soc}: {len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}, {len(v['breaks'])} "
            f"breaks, {v['parameters'] / 1e6:,.1f} M parameters ({size(v['parameter_bytes'])})",
            f"traced with torch {v['versions']['torch']} and torch_npu {v['versions']['torch_npu']} in "
            f"{v['wall_seconds']:.1f} s, {size(v['peak_memory'])} at most; nothing ran on an NPU",
        ]
        lines += [f"  break: {reason}" for reason in v["breaks"]]
        lines += ["rewrites"] + [f"  {name:<32} {count:>6}" for name, count in self.counts.items() if count]
        lines += ["kernels"] + [
            f"  {r['operator']:<40} {r['side']:<9} {r['calls']:>5}  {r['kernel']}" for r in self.lowered
        ]
        if self.unlowered:
            lines += ["not lowered: the NPU would run the reference"] + [
                f"  {r['operator']:<40} {r['side']:<9} {r['calls']:>5}  {r['reason']}" for r in self.unlowered
            ]
        if self.kernels:
            kinds = (
                (True, False, "Triton kernels that the graphs call"),
                (False, False, "Triton kernels of operators that torch_npu has one for"),
                (False, True, "Triton kernels generated from what no operator took, not in the graphs"),
            )
            for called, generated, what in kinds:
                rows = [
                    f"  {r['operator']:<40} {r['problem'] or kernel_text(r)}"
                    for r in self.kernels
                    if (r["in_graph"], r["generated"]) == (called, generated)
                ]
                lines += (
                    [f"{what}, compiled for {self.soc}, bishengir-compile {v['kernels']['compiler'].split()[0]}", *rows]
                    if rows
                    else []
                )
        elif v["kernels"]["problem"]:
            lines += [f"Triton kernels were not compiled: {v['kernels']['problem']}"]
        if costly := self.costly():
            lines += [
                f"modelled on {self.hardware}{'calls':>{46 - len(self.hardware)}}"
                f"{'GFLOP':>14}{'moved':>12}{'results':>12}{'time':>14}"
            ]
            lines += [
                f"  {r['operator']:<50}{r['calls']:>6}{r['flops'] / 1e9:>14,.1f}{size(r['bytes']):>12}"
                f"{size(r['made']):>12}{milliseconds(r['seconds']):>14}"
                for r in costly
            ]
        if self.skipped:
            lines += ["near misses"] + [
                f"  {n:>5} x {name}: {reason}" for (name, reason), n in _group_rows(self.skipped).items()
            ]
        if self.without_gradient:
            lines += [
                f"WITHOUT A GRADIENT: {len(self.without_gradient)} trainable parameters (unused, or lost): "
                f"{', '.join(self.without_gradient[:8])}"
            ]
        if rows := self.comparison():
            lines += [f"{'':<34}{'fused':>14}{'unfused':>14}"] + [f"  {what:<32}{a:>14}{b:>14}" for what, a, b in rows]
            lines += [
                f"  modelled time is {self.total('seconds') / self.total('seconds', True):.2f} of the unfused graphs': "
                f"{self.step()}"
            ]
        else:
            lines += [f"modelled time of the step on {self.hardware}: {self.step()}, {size(self.total('bytes'))} moved"]
        lines += [f"cost model: {self.hardware}, {self.basis}"]
        lines += [
            f"cost model: {note}"
            for note in dict.fromkeys(n for g in self.graphs for s in g["sides"] for n in s["cost"]["notes"])
        ]
        return "\n".join(lines)


def _by_reference(row: dict[str, Any]) -> bool:
    return row["kernel"].startswith("reference")


def _group_rows(rows: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row["pass"], row["reason"])
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _add_rows(parts: list[dict[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            totals[name] = totals.get(name, 0) + count
    return totals
