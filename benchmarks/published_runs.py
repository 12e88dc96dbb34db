"""Published training runs beside what the cost model says of them.

    python -m benchmarks.published_runs --ascend FILE --gpu FILE [--leave-out] [--brief]

Every end-to-end row and every peak of memory that can be read is predicted with the settings that the row has:
modelled, published, error. Rows that cannot be are counted with their reasons. The last lines have one summary for
each file and kind. "time" is whole pretraining and full fine-tuning, "ci time" tests of models cut to a few layers,
"lora time" adapters; rows that their table or their own contradictions make doubtful, other devices and FP8 are summed
apart.

--leave-out predicts each family with constants fitted to all others (``fit_runs.py``): what the model is worth for a
family that it has not seen. Without it the constants are those of the package.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import itertools
import math
import platform
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Iterable

import numpy as np
import torch

from benchmarks.fit_runs import Fit, fit, formulas, group_of, with_values
from benchmarks.published_cells import Case
from benchmarks.published_kernels import KernelRow, read_kernels
from benchmarks.published_rows import read_cases
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict import predict
from mindspeed_fx.planning.predict.memory import peak_memory
from mindspeed_fx.planning.predict.prediction import error_class
from mindspeed_fx.planning.predict.settings import FUSED, Settings

NEAR = 0.15


@dataclass
class Result:
    case: Case
    modelled: float
    inside: bool = False
    """Whether the published value is in the interval."""

    @property
    def error(self) -> float:
        return self.modelled / self.case.published - 1


def is_fitted(case: Case) -> bool:
    """Whether a row may enter a fit. DeepSpeed's runs are at the edge of the memory, where three times the time for
    half more tokens is the allocator's.
    """
    if case.run is not None and case.run.framework == "deepspeed":
        return False
    return not (case.reason or case.doubtful or case.low_precision) and case.kind in ("time", "ci time")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ascend", metavar="FILE", help="table of Ascend runs")
    parser.add_argument("--gpu", metavar="FILE", help="table of GPU runs")
    parser.add_argument("--leave-out", action="store_true", help="fit without each family in turn")
    parser.add_argument("--brief", action="store_true", help="summaries alone")
    parser.add_argument("--fit", action="store_true", help="print the constants that all rows give")
    options = parser.parse_args(args)
    print(f"torch {torch.__version__}, {platform.machine()}, {datetime.date.today()}; times are modelled, none is run")
    summary: list[str] = []
    for name, path in (("ascend", options.ascend), ("gpu", options.gpu)):
        if not path:
            continue
        cases, kernels = read_cases(path), read_kernels(path)
        if options.fit:
            print_fits(cases, kernels)
            continue
        results = predict_all(cases, kernels, options.leave_out)
        if not options.brief:
            print_rows(name, results)
            print_groups(name, results)
        print_reasons(name, cases)
        if name == "ascend" and not options.brief:
            print_gains(path, cases)
        summary += pair_order(name, results)
        summary += summaries(name, results)
    print("\n".join(summary))


def predict_all(cases: list[Case], kernels: list[KernelRow], leave_out: bool) -> list[Result]:
    """Every row that can be predicted."""
    fits = left_out_fits(cases, kernels) if leave_out else {}
    results = []
    for case in cases:
        if case.reason:
            continue
        if case.kind.startswith("memory"):
            target = "npu" if case.hardware.startswith("ascend") else "cuda"
            memory = peak_memory(case.model, case.run, target)
            if case.kind == "memory":  # of the first step, or of all of a run's on its first rank
                modelled = memory.steady[0] if "rank 0" in case.unit else memory.peak
                results.append(Result(case, memory.first_step if target == "npu" else modelled))
                continue
            for modelled, published in zip(memory.ranks, case.stages):
                results.append(Result(dataclasses.replace(case, published=published), modelled))
            continue
        try:
            prediction = predict(case.model, case.run, case.hardware)
        except OptionError as error:  # a run that the model refuses is no reason to say nothing of the others
            case.reason = f"refused: {error}"
            continue
        seconds = prediction.seconds
        if (own := fits.get((group_of(case.hardware), case.family))) is not None:
            seconds = own.seconds(case)
        low, high = (x / prediction.seconds * seconds for x in prediction.interval)
        results.append(Result(case, seconds, low <= case.published <= high))
    return results


def left_out_fits(cases: list[Case], kernels: list[KernelRow]) -> dict[tuple[str, str], Fit]:
    """(Group of devices, family) -> constants fitted to the group's other families."""
    fits = {}
    for group in ("ascend", "h100", "a100"):
        mine = [c for c in cases if is_fitted(c) and group_of(c.hardware) == group]
        families = sorted({c.family for c in cases if not c.reason and group_of(c.hardware) == group})
        if not mine or len({c.family for c in mine}) < 2:
            continue
        single = [k for k in kernels if group_of(k.hardware) == group]
        start = fit(mine, group, kernels=single).x
        for family in families:
            others = [c for c in mine if c.family != family]
            steps = 6 if len(others) < len(mine) else 1
            fits[group, family] = fit(others, group, start, steps, single)
    return fits


def print_fits(cases: list[Case], kernels: list[KernelRow]) -> None:
    for group in ("ascend", "h100", "a100"):
        mine = [c for c in cases if is_fitted(c) and group_of(c.hardware) == group]
        if not mine:
            continue
        single = [k for k in kernels if group_of(k.hardware) == group]
        result = fit(mine, group, kernels=single)
        print(f"{group}: {len(mine)} rows")
        for p, x, spread in zip(result.parameters, result.x, result.spread):
            value = min(math.exp(x), p.top)
            print(f"   {p.path:26} {value:10.4g}  spread {100 * spread:3.0f} %  prior {p.prior:g}")
        for k in single:
            modelled = k.seconds(formulas(*with_values(k.hardware, result.parameters, result.x))[0])
            print(f"   {k.label:26} {1e6 * modelled:10.1f} us, published {1e6 * k.published:10.1f}")


def print_rows(name: str, results: list[Result]) -> None:
    print(f"\n{name}: modelled and published seconds of a step, GiB of the fullest rank")
    for r in results:
        c = r.case
        unit = 2**30 if c.kind.startswith("memory") else 1.0
        marks = ("?" if c.doubtful else "") + ("8" if c.low_precision else "") + ("" if r.inside else "*")
        run = c.run
        mesh = f"{run.devices}: tp{run.tp} pp{run.pp} cp{run.cp} ep{run.ep} {run.microbatch}x{run.microbatches}"
        print(
            f"{c.what[:34]:34} {c.kind:9} {c.hardware:11} {mesh:34} {run.sequence:6} {r.modelled / unit:10.3f} "
            f"{c.published / unit:10.3f} {100 * r.error:7.1f} % {marks}"
        )


def print_groups(name: str, results: list[Result]) -> None:
    for what, key in (("family", lambda c: c.family), ("size", lambda c: c.size)):
        groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
        for r in results:
            if not r.case.doubtful and not r.case.low_precision:
                groups[r.case.kind, key(r.case)].append(r)
        print(f"\n{name}, by {what}: rows, median of the error, median of its size, share within 15 %")
        for (kind, group), members in sorted(groups.items()):
            errors = np.array([m.error for m in members])
            print(
                f"   {kind:9} {group:12} {len(members):4} {100 * np.median(errors):7.1f} % "
                f"{100 * np.median(np.abs(errors)):6.1f} % {100 * np.mean(np.abs(errors) <= NEAR):5.0f} %"
            )


def print_reasons(name: str, cases: Iterable[Case]) -> None:
    reasons = Counter((c.kind, c.reason) for c in cases if c.reason)
    print(f"\n{name}: {sum(reasons.values())} rows not predicted")
    for (kind, reason), count in reasons.most_common():
        print(f"   {count:4} {kind:15} {reason}")


def plan_of(run: Settings) -> tuple:
    """What two plans of one run differ in."""
    mesh = run.tp, run.pp, run.vpp, run.cp, run.cp_kind, run.ep, run.zero
    return *mesh, run.recompute, run.recompute_layers, run.offload


def pair_order(name: str, results: list[Result]) -> list[str]:
    """Of two runs of one model and length in one table that differ by more than 5 %: how often the faster one is
    modelled so; of all, and of those whose plans differ and not only devices, batch or versions."""
    groups: dict[tuple, list[Result]] = defaultdict(list)
    for r in results:
        c = r.case
        if c.kind in ("time", "ci time") and not c.doubtful and not c.low_precision:
            groups[c.model, c.run.sequence, c.hardware, c.source_device, c.unit, c.source[:40]].append(r)
    right, pairs = Counter(), Counter()
    for members in groups.values():
        speeds = [(m.case.run.tokens / m.case.run.devices, m) for m in members]
        for (tokens, a), (others, b) in itertools.combinations(speeds, 2):
            published = math.log(a.case.published / tokens / (b.case.published / others))
            if a.case.run == b.case.run or abs(published) <= 0.05:
                continue
            same = (math.log(a.modelled / tokens / (b.modelled / others)) > 0) == (published > 0)
            for kind in ("runs", "plans")[: 1 + (plan_of(a.case.run) != plan_of(b.case.run))]:
                pairs[kind] += 1
                right[kind] += same
    return [
        f"{name} pairs of {kind} of one model and length: order right in {right[kind]} of {pairs[kind]} that differ by "
        "more than 5 %"
        for kind in ("plans", "runs")
    ]


NO_FEATURES = {"overlap_gradients": False, "overlap_parameters": False}
SEVENTY = {"tp": 2, "pp": 2, "vpp": 5, "devices": 8, "batch": 16, "zero": 1, "fused": FUSED[:4]}
"""LLaMA2-70B in ten layers as MindSpeed's own system test of these switches runs it
(pretrain_llama2_70B_4k_tp2_pp2_vpp1_dp2): its table has the model on one data-parallel rank, where nothing overlaps."""
GAINS: dict[str, tuple[str, dict, dict]] = {
    "flash attention": ("LLaMA2-7B", {}, {"fused": ("rms_norm", "swiglu", "rope")}),
    "fused RMSNorm": ("LLaMA2-7B", {}, {"fused": ("attention", "swiglu", "rope")}),
    "fused SwiGLU": ("LLaMA2-7B", {}, {"fused": ("attention", "rms_norm", "rope")}),
    "fused RoPE": ("LLaMA2-7B", {}, {"fused": ("attention", "rms_norm", "swiglu")}),
    "matmul_add fusion": ("LLaMA2-7B", {"fused": FUSED}, {}),
    "CoC llama TP8 low": ("Bloom-7B1", {"overlap_tp": True, "tp_chunks": 2}, {"overlap_tp": False}),
    "CoC mid": ("Bloom-176B", {"overlap_tp": True, "tp_chunks": 2}, {"overlap_tp": False}),
    "CoC high": ("LLaMA2-70B", {"overlap_tp": True, "tp_chunks": 2}, {"overlap_tp": False}),
    "async DDP": ("LLaMA2-70B", {**SEVENTY, "overlap_gradients": True}, {**SEVENTY, **NO_FEATURES}),
    "overlap param gather": (
        "LLaMA2-70B",
        {**SEVENTY, "overlap_gradients": True, "overlap_parameters": True},
        {**SEVENTY, "overlap_gradients": True},
    ),
}
"""Feature -> the model that its page names, whose row of the vendor's table of runs gives the other settings, and what
is changed to have it and not to have it. CoC in two pieces, its page's first example."""


def print_gains(path: str, cases: list[Case]) -> list[float]:
    """Prints them; returns how many percentage points the modelled and the claimed one are apart."""
    with open(path, newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["kind"] == "feature_gain" and r["what"] in GAINS]
    runs = {c.what: c for c in reversed(cases) if c.kind == "time" and not c.reason and not c.doubtful}
    misses, signs = [], 0
    if not rows:
        return []
    print("\nascend feature gains: % faster, modelled and claimed")
    for row in rows:
        name, have, lack = GAINS[row["what"]]
        if name not in runs:
            print(f"   {row['what']:22} the table has no run of {name}")
            continue
        case = runs[name]
        model = dataclasses.replace(case.model, layers=10) if SEVENTY.items() <= have.items() else case.model
        having, lacking = (dataclasses.replace(case.run, **change) for change in (have, lack))
        gain = 100 * (
            predict(model, lacking, case.hardware).seconds / predict(model, having, case.hardware).seconds - 1
        )
        misses.append(abs(gain - float(row["value"])))
        signs += gain * float(row["value"]) > 0
        print(f"   {row['what']:22} {name:11} {gain:6.1f} {float(row['value']):6.1f}")
    if misses:
        print(f"   median difference {np.median(misses):.1f} percentage points, sign right in {signs} of {len(misses)}")
    return misses


def summaries(name: str, results: list[Result]) -> list[str]:
    """One line for each kind, device class and trust."""
    groups: dict[tuple[int, str], list[Result]] = defaultdict(list)
    for r in results:
        c = r.case
        if c.doubtful:
            order, note = 2, " (doubtful rows)"
        elif c.low_precision:
            order, note = 1, " (FP8)"
        elif name == "gpu" and group_of(c.hardware) != "h100":
            order, note = 1, " (other devices)"
        else:
            order, note = 0, " (H100 and H200, bfloat16)" if name == "gpu" and not c.kind.startswith("memory") else ""
        groups[order, c.kind + note].append(r)
    lines = []
    for (_, kind), members in sorted(groups.items()):
        errors = np.abs([m.error for m in members])
        runs = len({(m.case.what, m.case.config) for m in members})
        line = (
            f"{name} {kind}: median error {100 * np.median(errors):.1f} %, {100 * np.mean(errors <= NEAR):.0f} % of "
            f"{len(members)} rows within 15 % ({runs} runs"
        )
        if kind.startswith("memory"):
            line += f"; furthest under {-100 * min(m.error for m in members):.0f} %)"
        else:
            line += f"; {100 * np.mean([m.inside for m in members]):.0f} % in the interval)"
        lines.append(line)
    whole = [r for r in results if r.case.kind in ("time", "ci time") and not r.case.doubtful]
    whole = [r for r in whole if not r.case.low_precision and group_of(r.case.hardware) in ("ascend", "h100")]
    if whole:
        errors = np.abs([r.error for r in whole])
        lines.append(
            f"{name} time and ci time: median error {100 * np.median(errors):.1f} %, "
            f"{100 * np.mean(errors <= NEAR):.0f} % of {len(whole)} rows within 15 %"
        )
    for kind in ("dense", "small", "experts"):
        members = [r for r in whole if r.case.kind == "time" and error_class(r.case.model) == kind]
        if members:
            logs = np.abs(np.log([1 + r.error for r in members]))
            lines.append(
                f"{name} time, {kind}: four of five of {len(members)} rows within a factor of "
                f"{math.exp(np.quantile(logs, 0.8)):.3f}"
            )
    return lines


if __name__ == "__main__":
    main()
