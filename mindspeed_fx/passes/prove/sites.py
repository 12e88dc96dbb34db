"""``check="prove"``: what is known of every site that a pass rewrote.

* proved: before and after are the same function over the real numbers, at every element;
* checked: no proof, with the reason; the two agreed on random values;
* unknown: neither, with the reason.

A site whose two sides are shown to differ is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, fx_graph, tracing
from mindspeed_fx.graph.annotate import annotate, bodies
from mindspeed_fx.graph.functional_writes import make_writes_functional
from mindspeed_fx.passes.base import Pass
from mindspeed_fx.passes.check import CheckError, check_pass
from mindspeed_fx.passes.prove import terms
from mindspeed_fx.passes.prove.compare import difference
from mindspeed_fx.passes.prove.evaluate import Evaluator, leaf
from mindspeed_fx.passes.prove.numeric import NoNumber, witness
from mindspeed_fx.passes.prove.obligations import (
    MOST_STEPS,
    Diff,
    NotComparable,
    Obligation,
    Side,
    has_whole_numbers,
    last_shared,
    signature,
    to_open,
)
from mindspeed_fx.passes.prove.terms import TooLarge
from mindspeed_fx.passes.prove.values import Unsupported, Value
from mindspeed_fx.report.records import PassReport, SiteProof

ROUNDS = 6
"""How often nodes are looked into that both graphs have, before a proof is given up."""
MOST_BYTES = 1 << 28
"""Inputs of a graph that is run on values."""
MOST_KEPT_TERMS = 400_000


class ProofError(CheckError):
    """A rewrite changed what is computed; the message names the pass, the site and the first term that differs."""


@dataclass
class Outcome:
    """What is known of one obligation: proved, or why not, and what shows that it is wrong."""

    reason: str = ""
    term: str = ""
    witness: str = ""


_KNOWN: dict[str, Outcome] = {}
"""Signature of an obligation -> its outcome: equal layers are proved once."""


def prove_pass(p: Pass, before: fx.GraphModule, after: fx.GraphModule, report: PassReport) -> list[SiteProof]:
    """One entry for each of ``report.rewrites``; ``before`` is changed.

    Raises:
        ProofError: a site computes something else.
        CheckError: a site without a proof does, on values.
    """
    if not report.rewrites:
        return []
    original = fx_graph.copy_graph(before)
    outcomes: list[tuple[set[str], Outcome]] = []
    try:
        for old, new in _graphs(before, fx_graph.copy_graph(after)):
            outcomes += _outcomes(old, new)
    except NotComparable as error:
        outcomes.append((set(), Outcome(str(error))))
    except Exception as error:  # noqa: BLE001  a fault of the prover is none of the pass
        outcomes.append((set(), _failed(error)))
    results, values = [], ""
    rewritten = {name for site in report.rewrites for name in site.nodes}
    for site in report.rewrites:
        mine = [o for names, o in outcomes if names & set(site.nodes) or not names & rewritten]
        mine = mine or [o for _, o in outcomes]
        if refuted := [o for o in mine if o.witness]:
            place = " ".join(w for w in (site.module, site.source) if w) or ", ".join(site.nodes)
            raise ProofError(
                f'check: pass "{p.name}" changed what is computed at {site.operator}, {place}: {refuted[0].witness}; '
                f"before - after = {refuted[0].term}"
            )
        reasons = [o.reason for o in mine if o.reason]
        if reasons and not values:
            values = _on_values(p, original, after)
        results.append(_proof(reasons, values))
    return results


def _proof(reasons: list[str], values: str) -> SiteProof:
    if not reasons:
        return SiteProof("proved")
    checked = not values.startswith("no values")
    return SiteProof("checked" if checked else "unknown", reasons[0] if checked else f"{reasons[0]}; {values}")


def _on_values(p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> str:
    """The line of the numeric check, or "no values" with the reason."""
    inputs = [fx_graph.example_value_of(n) for n in before.graph.nodes if n.op == "placeholder"]
    size = sum(fake.hint(v.numel()) * v.element_size() for v in inputs if isinstance(v, torch.Tensor))
    if size > MOST_BYTES:
        return f"no values were compared: the graph reads {size >> 20} MiB"
    try:
        return check_pass(p, before, after, differentiable=p.stage == "captured")
    except CheckError:
        raise
    except Exception as error:  # noqa: BLE001  random values need not be valid inputs
        return f"no values were compared: {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def _graphs(before: fx.GraphModule, after: fx.GraphModule) -> list[tuple[fx.GraphModule, fx.GraphModule]]:
    """The two graphs and the graphs within them that belong together."""
    results = [(before, after)]
    inner = [bodies(gm) for gm in (before, after)]
    if len(inner[0]) != len(inner[1]):
        raise NotComparable("another number of graphs within the graph")
    for old, new in zip(*inner):
        results += _graphs(old, new)
    return results


def _outcomes(before: fx.GraphModule, after: fx.GraphModule) -> list[tuple[set[str], Outcome]]:
    """(names of the nodes that are concerned, outcome) of all that is owed."""
    for gm in (before, after):
        if any(n.op == "call_function" and tracing.is_mutable(n.target) for n in gm.graph.nodes):
            make_writes_functional(gm)
            annotate(gm)
    diff = Diff(before, after)
    results = []
    for a, b in diff.in_order():
        obligation = diff.obligation(a, b)
        for old, new in diff.likely(obligation):
            lemma = diff.obligation(old, new, first=diff.owed[a, b])
            if not to_open(lemma) and not _outcome(diff, lemma, rounds=1).reason:
                diff.learn(old, new)
                obligation = diff.obligation(a, b)
        names = {n.name for side in (obligation.before, obligation.after) for n in side.inner}
        results.append((names, _outcome(diff, obligation)))
    return results


def _outcome(diff: Diff, obligation: Obligation, rounds: int = ROUNDS) -> Outcome:
    key = f"{rounds} {signature(obligation)}"
    if key not in _KNOWN:
        if terms.size_of_tables() > MOST_KEPT_TERMS:
            terms.forget()
        _KNOWN[key] = _examined(diff, obligation, rounds)
    return _KNOWN[key]


def _examined(diff: Diff, obligation: Obligation, rounds: int) -> Outcome:
    """Prove; where that fails look into nodes that both graphs have, as long as there are some. What then still differs
    on numbers is wrong."""
    opened: set[str] = set()
    names = (obligation.before.node.name, obligation.after.node.name)
    current, outcome = obligation, Outcome("no round")
    for n in range(rounds):
        outcome = _tried(current)
        if not outcome.reason:
            return outcome
        if n == rounds - 1:
            return outcome if are_free(current) else replace(outcome, witness="")
        new = to_open(current) or {n for n in [last_shared(current)] if n is not None}
        if not new:
            break
        while new and len(current.before.inner) + len(current.after.inner) < MOST_STEPS:
            opened |= new
            current = diff.obligation(*names, frozenset(opened))
            new = to_open(current)
    return outcome


def are_free(obligation: Obligation) -> bool:
    """Whether no leaf is a mask or an index that the graph computes: numbers for those need be none that it has, and
    refute nothing."""
    leaves = (*obligation.before.leaves.values(), *obligation.after.leaves.values())
    return not any(n.op == "call_function" and has_whole_numbers(n) for n in leaves)


def _tried(obligation: Obligation) -> Outcome:
    sides = (obligation.before, obligation.after)
    if any(n.meta.get("mutated") for side in sides for n in (*side.inner, *side.leaves.values())):
        return Outcome("memory that is written in place")
    if any(isinstance(s, torch.SymInt) for side in sides for n in side.inner for s in _sizes(n)):
        return Outcome("sizes are symbols")
    try:
        before, after = (_value(side) for side in sides)
        left = difference(before, after)
    except (Unsupported, TooLarge) as error:
        return Outcome(str(error))
    except RecursionError:
        return Outcome("terms nest too deeply")
    except Exception as error:  # noqa: BLE001  a fault of the prover is none of the pass
        return _failed(error)
    if left is None:
        return Outcome()
    try:
        return Outcome(f"left is {left}", str(left), witness(before, after) or "")
    except Exception as error:  # noqa: BLE001  without a number nothing is refuted
        why = error if isinstance(error, NoNumber) else _failed(error).reason
        return Outcome(f"left is {left}, which has no number ({why})", str(left))


def _failed(error: Exception) -> Outcome:
    lines = str(error).splitlines() or [""]
    return Outcome(f"the proof failed with {type(error).__name__}: {lines[0][:120]}")


def _sizes(n: fx.Node) -> list[Any]:
    values = torch.utils._pytree.tree_leaves(n.meta.get("val"))
    return [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v])]


def _value(side: Side) -> Value:
    tensors = {name: n for name, n in side.leaves.items() if isinstance(n.meta.get("val"), torch.Tensor)}
    leaves = {n: leaf(name, n.meta["val"]) for name, n in tensors.items()}
    result = Evaluator(side.node.graph.owning_module, leaves).value(side.node)
    if not isinstance(result, Value):
        raise Unsupported(f"{side.node.name} is no tensor")
    return result
