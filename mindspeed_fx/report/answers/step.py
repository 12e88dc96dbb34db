"""Time and memory of the step: what is alive at the peak, which collective is exposed, why the first step is slow."""

from __future__ import annotations

from typing import Any, Mapping

from mindspeed_fx.report.answers.base import Answer, Facts, mib, ms, plural
from mindspeed_fx.report.facts import resident_bytes

UNKNOWN = 'nothing is modelled: no hardware is known (option "hardware")'


def peak(facts: Facts, _: str) -> Answer:
    """What is alive at the peak of the step, largest first."""
    memory = facts.values.get("memory")
    if not memory:
        return Answer((UNKNOWN,))
    at, inputs = memory["at"], memory["given"]
    side = "backward" if at["kernel"] >= memory["backward_begins"] > 0 else "forward"
    head = f"{mib(memory['peak'])} are alive during {at['operator']} of {at['module'] or 'the model'}"
    lines = [
        f"{head}, kernel {at['kernel'] + 1} of {at['kernels']}, in the {side}",
        f"beside them {mib(resident_bytes(inputs))} of parameters, buffers and inputs; modelled by the graph's sizes",
    ]
    rows = [(mib(x["bytes"]), x["operator"], x["module"] or "(model)", x["name"]) for x in memory["live"]]
    if memory["others"]["count"]:
        rows.append((mib(memory["others"]["bytes"]), "", "", f"{memory['others']['count']} smaller ones"))
    return Answer(tuple(lines), ("size", "operator", "module", "result"), rows)


def exposed(facts: Facts, _: str) -> Answer:
    """Collectives for which the compute stream stands still, the longest first."""
    step = facts.values.get("step")
    if not step:
        return Answer((UNKNOWN,))
    rows, bare = step["collectives"], [s for s in step["collectives"] if s["exposed"] > 0]
    if not rows:
        return Answer((f"none: this graph sends nothing; its step is {ms(step['seconds'])} of compute, modelled",))
    share = step["exposed_seconds"] / step["seconds"] if step["seconds"] else 0.0
    lines = [
        f"{len(bare)} of {plural(len(rows), 'collective')} exposed: {ms(step['exposed_seconds'])}, {share:.1%} of the "
        f"step of {ms(step['seconds'])}; modelled",
    ]
    lines += [f"longest: {bare[0]['name']} of {bare[0]['module'] or 'the model'}"] if bare else []
    head = ("exposed", "takes", "sends", "collective", "where", "why")
    return Answer(tuple(lines), head, [_sent(s) for s in rows])


def _sent(s: Mapping[str, Any]) -> tuple[str, ...]:
    where = f"{s['graph']} {s['module']} ({s['link']})" if s["module"] else f"{s['graph']} ({s['link']})"
    why = s["reason"].partition("exposed: ")[2] or ("hidden under compute" if not s["exposed"] else "")
    return ms(s["exposed"]), ms(s["seconds"]), mib(s["bytes"]), s["name"], where, why


PARTS = (
    ("dynamo", "Dynamo: reading Python into a graph"),
    ("capture", "capture: one spelling of the graph"),
    ("passes", "passes of mindspeed_fx"),
    ("lowering", "lowering to kernels"),
    ("autograd", "AOTAutograd: tracing the backward, and the partition"),
    ("generation", "Inductor: lowering, scheduling and writing code"),
    ("compilers", "C++ or Triton compilers of what was generated"),
    ("running", "guards, running the step itself, and what no part counts"),
)


def step1(facts: Facts, _: str) -> Answer:
    """The parts of the first step, longest first."""
    seconds = parts_of(facts.values["seconds"])
    whole = sum(seconds.values())
    if not whole:
        return Answer(("no times were kept of this graph",))
    words = dict(PARTS)
    order = sorted((n for n in seconds if seconds[n] > 0), key=lambda n: -seconds[n])
    longest = order[0]
    lines = [f"{seconds[longest] / whole:.0%} of {whole:.2f} s is {words[longest]}", *_advice(facts, longest)]
    slow = sorted(facts.values["runs"], key=lambda r: -r["seconds"])[:3]
    names = ", ".join(
        f"{r['report']['name']} ({r['stage']}) {r['seconds']:.2f} s" for r in slow if r["seconds"] > 0.005
    )
    lines += [f"slowest passes: {names}"] if names else []
    if "first step" not in facts.values["seconds"]:
        lines.append("the step itself was not timed: explain does that")
    rows = [(f"{seconds[n]:.2f} s", f"{seconds[n] / whole:.0%}", words[n]) for n in order]
    return Answer(tuple(lines), ("time", "share", "part"), rows)


def parts_of(times: Mapping[str, float]) -> dict[str, float]:
    """The named times of a record as parts that do not overlap."""
    known = {name: times.get(name, 0.0) for name in ("dynamo", "capture", "passes", "lowering", "compilers")}
    codegen = times.get("codegen", 0.0)
    ours = known["capture"] + known["passes"] + known["lowering"] + codegen
    # a backward that is compiled when it first runs is no part of "compile"
    autograd = max(0.0, times.get("compile", 0.0) - ours)
    parts = {**known, "autograd": autograd, "generation": max(0.0, codegen - known["compilers"])}
    if "first step" in times:
        parts["running"] = max(0.0, times["first step"] - sum(parts.values()))
    return parts


def _advice(facts: Facts, longest: str) -> list[str]:
    effective = facts.values["effective"]
    lines = [f"compile caches: {effective.get('caches')}; a warm cache skips passes, code and compilers"]
    if longest in ("generation", "compilers"):
        lines.append('codegen "eager" generates no code; level 2 shares the code of repeated layers')
    if longest == "passes":
        lines.append('level 1 runs fewer passes; "disable" leaves out single ones')
    return lines
