"""The step otherwise: at another level, without a family of rewrites, with another batch."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.report.answers.base import Answer, Facts, mib, ms, percent
from mindspeed_fx.report.families import FAMILIES

HEAD = ("form", "step", "kernels", "read and written", "peak", "rewrites", "against as it is")
SHARE = 0.9
"""Of the device's memory, what a step may take: as the plan search has it."""
ADAM = 8
"""Bytes of Adam's two states for each element, in float32."""


def level(facts: Facts, value: str) -> Answer:
    """The step at another level."""
    return _compared(facts, "level", value, f"level {value or 1}")


def bought(facts: Facts, family: str) -> Answer:
    """What one family of rewrites bought: measured where the step was, and modelled."""
    check("bought", family)
    measured = facts.values.get("measured")
    rows = [f for f in (measured or {}).get("families", ()) if f["family"] == family]
    sites = sum(n for name, n in facts.values["counts"].items() if name in FAMILIES[family])
    if not sites:
        return Answer((f"nothing: no {family} were rewritten in this graph",))
    lines = [_measured(f, measured) for f in rows]
    answer = _compared(facts, "without", family, f"without {family}")
    if not lines and measured is None:
        lines = ["not measured: explain(..., measure=True), or mindspeed-fx explain SCRIPT.py:FUNCTION --measure"]
    known = _variant(facts, "without", family)
    head = [f"{sites} places were rewritten"]
    if known is not None and not known["error"]:
        base = facts.values["what_if"]["base"]
        gain = known["seconds"] - base["seconds"]
        word = "saves" if gain >= 0 else "costs"
        head.append(
            f"modelled: it {word} {ms(abs(gain))} of {ms(known['seconds'])} a step, "
            f"without it {known['kernels'] - base['kernels']:+} kernels, peak {mib(known['peak'])} instead of "
            f"{mib(base['peak'])}"
        )
        return Answer((*head, *lines), answer.head, answer.rows)
    return Answer((*head, *lines, *answer.lines), answer.head, answer.rows)


def _measured(f: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    if f["error"]:
        return f"not measured: {f['error']}"
    within = ", within the spread: nothing can be said" if abs(f["gain_seconds"]) < f["spread"] else ""
    return (
        f"measured on {measured['device']}: {ms(f['gain_seconds'])} of {ms(f['without_seconds'])} a step "
        f"(spread {ms(f['spread'])}{within})"
    )


def batch(facts: Facts, value: str) -> Answer:
    """Whether a batch fits the device: bytes alive at the peak, what is resident, and the optimizer's states."""
    memory, forms = facts.values.get("memory"), facts.values.get("what_if")
    if not memory:
        return Answer(('nothing is modelled: no hardware is known (option "hardware")',))
    capacity = facts.memory or int(SHARE * memory["capacity"])
    whose = "--memory" if facts.memory else f"{SHARE:.0%} of what {facts.values['effective']['hardware']} has"
    states = ADAM * memory["given"].get("elements", 0)
    check("batch", value)
    wanted = int(value)
    sizes = _sizes(forms)
    if not sizes:
        base = (memory["peak"] + sum(memory["given"].get(k, 0) for k in ("trainable", "other")), 0.0)
        lines = (_verdict("this batch", base[0], states, capacity, whose), _missing("batch", str(wanted)))
        return Answer(lines)
    rows = [
        (
            f"batch {b}",
            mib(peak + resident),
            mib(peak + resident + states),
            _fits(peak + resident + states, capacity),
            ms(s),
        )
        for b, (peak, resident, s) in sorted(sizes.items())
    ]
    lines = [_for_batch(wanted, sizes, states, capacity, whose)]
    lines += [
        f"batch {v['value']} was not modelled: {v['error']}"
        for v in forms["variants"]
        if v["kind"] == "batch" and v["error"]
    ]
    lines.append(
        f"taken: parameters, buffers, inputs, results, gradients; Adam's states are {mib(states)} more; modelled"
    )
    return Answer(tuple(lines), ("", "without optimizer", "with Adam", f"in {mib(capacity)}", "step"), rows)


def _for_batch(wanted: int, sizes: Mapping[int, tuple[int, int, float]], states: int, capacity: int, whose: str) -> str:
    if wanted in sizes:
        peak, resident, _ = sizes[wanted]
        return _verdict(f"batch {wanted}", peak + resident, states, capacity, whose)
    if len(sizes) < 2:
        return _missing("batch", str(wanted))
    near = sorted(sizes, key=lambda b: (abs(b - wanted), b))[:2]
    (b0, t0), (b1, t1) = sorted((b, sizes[b][0] + sizes[b][1]) for b in near)
    total = round(t0 + (t1 - t0) * (wanted - b0) / (b1 - b0))
    return f"{_verdict(f'batch {wanted}', total, states, capacity, whose)}; by a line through batch {b0} and {b1}"


def _verdict(what: str, total: int, states: int, capacity: int, whose: str) -> str:
    need = total + states
    word = "fits" if need <= capacity else "does not fit" if total > capacity else "fits without Adam's states alone"
    return f"{what} {word}: it takes {mib(need)} with Adam's states, {mib(total)} without, of {mib(capacity)} ({whose})"


def _fits(need: int, capacity: int) -> str:
    return "fits" if need <= capacity else "does not fit"


def _sizes(forms: Mapping[str, Any] | None) -> dict[int, tuple[int, int, float]]:
    """Batch -> peak, resident bytes and seconds."""
    if not forms or not forms["batch"]:
        return {}
    rows = [forms["base"], *(v for v in forms["variants"] if v["kind"] == "batch" and not v["error"])]
    return {int(v["value"]): (v["peak"], v["resident"], v["seconds"]) for v in rows}


def _compared(facts: Facts, kind: str, value: str, words: str) -> Answer:
    """The step as it is and in the forms of one kind, and what the one that is asked for would cost."""
    forms, effective = facts.values.get("what_if"), facts.values["effective"]
    if kind == "level":
        check("level", value)
        if int(value) == effective.get("level"):
            return Answer((f"it is compiled at level {value}", *_missing_rows(forms)), *_rows(forms, kind))
    known = _variant(facts, kind, value)
    if forms is None or known is None:
        return Answer((_missing(kind, value),))
    if known["error"]:
        return Answer((f"{words} was not modelled: {known['error']}",), *_rows(forms, kind))
    base = forms["base"]
    more, peak = known["seconds"] - base["seconds"], known["peak"] - base["peak"]
    share = percent(more, base["seconds"]) or "nothing modelled"
    head = (
        f"{words}: {ms(known['seconds'])} a step instead of {ms(base['seconds'])} "
        f"({share}), {known['kernels'] - base['kernels']:+} kernels, peak "
        f"{mib(known['peak'])} instead of {mib(base['peak'])} ({percent(peak, base['peak'])}); modelled"
    )
    note = (forms["note"],) if forms["note"] else ()
    return Answer((head, *note), *_rows(forms, kind))


def _rows(forms: Mapping[str, Any] | None, kind: str) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    if not forms:
        return (), ()
    rows = [forms["base"], *(v for v in forms["variants"] if v["kind"] == kind)]
    return HEAD, [_row(v, forms["base"]) for v in rows]


def _row(v: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[str, ...]:
    name = "as it is" if v["kind"] == "base" else f"{v['kind']} {v['value']}"
    if v["error"]:
        return name, "", "", "", "", "", v["error"]
    share = percent(v["seconds"] - base["seconds"], base["seconds"]) if v is not base else ""
    return name, ms(v["seconds"]), str(v["kernels"]), mib(v["bytes"]), mib(v["peak"]), str(v["rewrites"]), share


def _variant(facts: Facts, kind: str, value: str) -> Mapping[str, Any] | None:
    forms = facts.values.get("what_if") or {"variants": ()}
    return next((v for v in forms["variants"] if (v["kind"], v["value"]) == (kind, value)), None)


def _missing(kind: str, value: str) -> str:
    question = {"without": "bought"}.get(kind, kind)
    return (
        f"not modelled here; mindspeed-fx ask SCRIPT.py:FUNCTION {question} {value} models it, and so does "
        f'explain(..., what_if=["{kind} {value}"]); explain --what-if puts all forms on the page'
    )


def _missing_rows(forms: Any) -> tuple[str, ...]:
    return (
        () if forms else ("other levels are not modelled here: explain --what-if, or ask SCRIPT.py:FUNCTION level N",)
    )


def check(question: str, about: str) -> None:
    """Refuse what "level", "bought" or "batch" cannot be about.

    Raises:
        OptionError: with the valid ones.
    """
    if question == "bought" and about not in FAMILIES:
        raise OptionError(f"bought: no family {about!r}{nearest(about, FAMILIES)}; valid: {', '.join(FAMILIES)}")
    if question == "level" and about not in ("0", "1", "2"):
        raise OptionError(f"level: {about!r}; valid: 0, 1, 2")
    if question == "batch" and not (about.isdigit() and int(about)):
        raise OptionError(f"batch: {about!r}; valid: a whole number from 1 on")
