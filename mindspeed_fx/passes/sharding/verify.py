"""The pass ``sharding.verify``: no collective of one rank's program is redundant, and nothing is computed whole that
the plan did not ask for.

Read off the joint graph, before anything buckets or chunks its collectives; nothing is rewritten. A finding is a near
miss of the pass, with
module and line: ``report.skipped("sharding.verify")``, the log, the HTML page. What is looked for:

* an all-gather of which a rank reads its own part alone, or whose result is scattered again; a reduce-scatter that is
  only gathered again
* a collective that is made twice of one value
* an operator that is computed alike on every rank though what it reads is divided, without an edge of the plan
* an operator whose gradient is computed on more than the operator was, as if what the forward divides were whole
  (:mod:`mindspeed_fx.sharding.audit.replicated_backward`)
* more collectives, or more bytes, than the plan's edges need (:mod:`mindspeed_fx.sharding.spmd.expected_collectives`)
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.passes.base import Context, PassReport, register, skip
from mindspeed_fx.passes.sharding.recognize import LAYER, Collective, kind_of, list_collectives
from mindspeed_fx.report.records import Skip
from mindspeed_fx.sharding.audit.gather_layout import Layout, follow_elements
from mindspeed_fx.sharding.audit.replicated_backward import grown
from mindspeed_fx.sharding.expected import NUMBER, Send
from mindspeed_fx.sharding.plan_svg import picture

NAME = "sharding.verify"
GATHER, SCATTER = "all_gather", "reduce_scatter"


@dataclass(frozen=True)
class Made:
    """A collective of the local program."""

    node: fx.Node
    collective: Collective
    dim: str
    """Mesh dimension; the group's name where it is none."""
    backward: bool


@register(NAME)
def verify(gm: fx.GraphModule, context: Context) -> PassReport:
    """Looks for redundant collectives, and for computations that a plan did not ask to be whole."""
    report, result = PassReport(NAME), context.sharding
    if result is None or result.program is None:
        return report.note_reason("the model is not parallelized (mindspeed_fx.parallelize)")
    with symbols.without_guards(gm):
        return _verified(gm, report, result)


def _verified(gm: fx.GraphModule, report: PassReport, result: Any) -> PassReport:
    mesh, traffic = result.sharding.mesh, result.program.traffic
    output = collectives(gm, mesh)
    places = {mesh.mesh_dim_names[i]: mesh.get_local_rank(i) for i in range(mesh.ndim)}
    report.skipped += [*undone(output, places), *find_repeated(output), *beyond(output, traffic.messages)]
    report.skipped += [
        Skip(
            w.operator,
            f'computed whole on every rank of "{w.dim}" though what it reads is divided, and the plan names no edge '
            "for that",
            w.module,
            w.source,
        )
        for w in traffic.wholes
    ]
    report.skipped += [Skip("kept whole", reason) for reason in result.program.kept.reasons]
    report.notes += [f"padded: {text}" for text in result.program.kept.padded]
    larger, alternatives = grown(gm, forward_of(gm), min((n for n in mesh.shape if n > 1), default=2))
    report.skipped += [
        skip(
            str(g.node.target),
            g.node,
            f"the backward computes {g.times:.3g} times what the forward has of it here: a gradient is whole on every "
            "rank, and the plan names no edge for that",
        )
        for g in larger
    ]
    report.notes += [
        *describe_counts(output, traffic.messages),
        f"{alternatives} operators of the backward compared with what the forward has of them here",
    ]
    report.files["collectives.json"] = json.dumps(
        [
            {
                "kind": m.collective.kind,
                "dimension": m.dim,
                "bytes": m.collective.bytes,
                "backward": m.backward,
                "module": m.collective.module,
            }
            for m in output
        ],
        indent=1,
    )
    names = mesh.mesh_dim_names
    at_rest = {
        v.name: {names[i]: f"S({p.dim})" for i, p in enumerate(v.placements) if p.is_shard()}
        for v in result.program.values
        if v is not None and v.parameter
    }
    report.files["plan.svg"] = picture(
        at_rest, {d: g for d, g in result.plan.gather.items() if g != "never"}, traffic.messages
    )
    if not report.skipped:
        report.notes.append(
            f"{len(output)} collectives, none of them redundant; nothing is computed whole that the plan wants divided"
        )
    return report


def collectives(gm: fx.GraphModule, mesh: Any) -> list[Made]:
    """Those of a joint graph, in order."""
    dims = {mesh.get_group(i).group_name: mesh.mesh_dim_names[i] for i in range(mesh.ndim)}
    forward = forward_of(gm)
    return [Made(n, c, dims.get(c.group, c.group), n not in forward) for n, c in list_collectives(gm)]


def forward_of(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes of a joint graph that its results need."""
    later: set[fx.Node] = set()
    for n in gm.graph.nodes:
        if n.op == "placeholder" and "tangents" in str(n.target) or any(a in later for a in n.all_input_nodes):
            later.add(n)
    # What the results need is forward; what gradients need alone is backward, though it may not wait for a gradient
    # (keys that go round again).
    output = next(n for n in gm.graph.nodes if n.op == "output")
    forward: set[fx.Node] = set()
    pending = [a for a in output.all_input_nodes if a not in later]
    while pending:
        if (n := pending.pop()) not in forward:
            forward.add(n)
            pending += n.all_input_nodes
    return forward


def undone(results: Sequence[Made], places: dict[str, int]) -> Iterator[Skip]:
    """Gathers whose result is read in own parts or scattered again, and scatters that are gathered again."""
    for m in results:
        word = m.collective.kind
        if word not in (GATHER, SCATTER):
            continue
        ends = list(follow_elements(m.node))
        if not ends or any(layout is None for _, layout in ends):
            continue
        size, again = m.node.meta["val"].numel(), SCATTER if word == GATHER else GATHER
        back = [_is(user, again, m) and _whole(layout, size) for user, layout in ends]
        if all(back):
            yield skip(
                word,
                m.node,
                f'its result over "{m.dim}" is only {"scattered" if word == GATHER else "gathered"} again'
                + ("" if word == GATHER else ": one all_reduce does both"),
            )
        elif word == GATHER:
            part = size * m.node.meta["val"].dtype.itemsize // (m.collective.bytes or 1)
            own = size // max(part, 1)
            if all(layout.span()[0] // own == layout.span()[1] // own == places.get(m.dim, -1) for _, layout in ends):
                yield skip(word, m.node, f'of what is gathered over "{m.dim}" this rank reads its own part alone')


def _is(node: fx.Node, word: str, other: Made) -> bool:
    result = kind_of(node)
    return result is not None and result[0] == word and result[1] == other.collective.group


def _whole(layout: Layout, size: int) -> bool:
    return layout.span() == (0, size - 1)


def find_repeated(results: Sequence[Made]) -> Iterator[Skip]:
    """The same collective of the same value, twice in one direction; twice in both may be the price of memory."""
    seen: set[tuple] = set()
    for m in results:
        key = (m.backward, m.node.target, m.node.args)
        if key in seen and m.collective.bytes > NUMBER:
            yield skip(m.collective.kind, m.node, f'made twice of one value over "{m.dim}"')
        seen.add(key)


def beyond(results: Sequence[Made], messages: Sequence[Send]) -> Iterator[Skip]:
    """Collectives that no edge of the plan needs. One may be smaller than what is allowed for: a gradient that was
    scattered over another dimension before, or that is gathered because the ranks have parts of it and no sums."""
    spare: dict[tuple[bool, str, str], list[int]] = {}
    for s in sorted(messages, key=lambda s: -s.bytes):
        spare.setdefault((s.backward, s.dim, s.kind), []).append(s.bytes)
    for m in sorted(results, key=lambda m: -m.collective.bytes):
        if m.collective.bytes <= NUMBER:
            continue
        for word in (m.collective.kind, "all_reduce")[: 1 + (m.collective.kind == GATHER)]:
            allowed = spare.get((m.backward, m.dim, word), [])
            if (fits := max((i for i, n in enumerate(allowed) if n >= m.collective.bytes), default=None)) is not None:
                allowed.pop(fits)  # the smallest that is large enough
                break
        else:
            yield skip(
                m.collective.kind,
                m.node,
                f'{"backward" if m.backward else "forward"}: {m.collective.bytes} bytes over "{m.dim}" that no edge of '
                "the plan needs",
            )


def describe_counts(results: Sequence[Made], messages: Sequence[Send]) -> list[str]:
    """Counts and bytes per direction, mesh dimension and layer, beside the fewest."""
    lines = []
    for back in (False, True):
        for dim in sorted({m.dim for m in results if m.backward == back}):
            mine = [m.collective for m in results if m.backward == back and m.dim == dim]
            least = [s for s in messages if s.backward == back and s.dim == dim]
            layers = {result.group(1) for c in mine if (result := LAYER.match(c.module))}
            each = Counter(c.kind for c in mine if c.layer)
            per = (
                f"; per layer {', '.join(f'{n / len(layers):g} {k}' for k, n in sorted(each.items()))}, "
                f"{sum(c.bytes for c in mine if c.layer) / len(layers) / 2**20:.4g} MiB"
                if layers
                else ""
            )
            lines.append(
                f'{"backward" if back else "forward"}, "{dim}": {len(mine)} collectives of '
                f"{sum(c.bytes for c in mine) / 2**20:.4g} MiB; the edges of the plan need {len(least)} of "
                f"{sum(s.bytes for s in least) / 2**20:.4g} MiB, and a few numbers{per}"
            )
    return lines
