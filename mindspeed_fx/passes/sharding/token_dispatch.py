"""The mixtures of a captured graph whose tokens can be dispatched by all-to-all: -> the calls of
:mod:`mindspeed_fx.sharding.spmd.token_dispatch`, for plans that say
``experts: {dispatch: all_to_all}``.

A mixture is rows sorted by expert (``mindspeed::moe_permute``), products and whatever works row by row, and the way
back (``mindspeed::moe_unpermute``). Its numbers of rows per expert must be counts of the same choices that sort it:
then every rank may sort and count its own. Equal on one device; nothing is moved here.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, PassReport, register, site
from mindspeed_fx.passes.sharding.sorted_rows import choices, move_edges, sorted_table, weigh_before
from mindspeed_fx.sharding.constraint import operands
from mindspeed_fx.sharding.patterns import matching
from mindspeed_fx.sharding.plan import ShardingError

NAME = "sharding.token_dispatch"
aten, ops = torch.ops.aten, torch.ops.mindspeed


@register(NAME)
def dispatch_tokens(gm: fx.GraphModule, context: Context) -> PassReport:
    """Marks the mixtures of experts whose tokens a plan sends to their experts."""
    report = PassReport(NAME)
    sharding = context.sharding
    if sharding is None:
        return report.note_reason("the model is not parallelized (mindspeed_fx.parallelize)")
    if not sharding.plan.uses_all_to_all:
        return report.note_reason(
            f'plan "{sharding.plan.name}" does not send tokens to experts (experts: {{dispatch: all_to_all}})'
        )
    for graph in _graphs(gm):
        for node in [n for n in graph.graph.nodes if n.target is ops.moe_permute.default]:
            move_edges(node)
            _rewrite(weigh_before(graph, node), report)
        graph.graph.eliminate_dead_code()
        recompile(graph)
    if not report.rewrites and sharding.plan.is_of_stage and not _has_experts(gm, sharding):
        return report.note_reason("no parameter of this graph, a stage of a pipeline, is one of experts")
    if not report.rewrites and not sharding.sharding.reads_loops:
        return report.note_reason("the model's loops over experts are run as they are written, whole on every rank")
    if not report.rewrites:
        raise ShardingError(
            f'plan "{sharding.plan.name}" sends tokens to experts, and no mixture was found in this graph: rows sorted '
            "by expert (fusion.moe_permute) or weights gathered by expert (fusion.gathered_experts), both of level 1; "
            'plan "ep" gathers tokens instead'
        )
    return report


def _has_experts(gm: fx.GraphModule, sharding: Any) -> bool:
    """Whether a parameter of the graph is one of experts: of those that the plan names, or, where it names none,
    [experts, ., .]; a stage of a pipeline may have none."""
    own = [n for n in gm.graph.nodes if n.op == "placeholder" and n.name in sharding.inputs]
    if named := sharding.plan.experts.get("parameters", ()):
        return any(matching(named, sharding.inputs[n.name]) for n in own)
    return any(n.meta["val"].ndim == 3 for n in own)


def _graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield gm
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and tracing.is_higher_order(node.target):
            for body, _ in operands(gm, node):
                yield from _graphs(body)


def _rewrite(node: fx.Node, report: PassReport) -> None:
    from mindspeed_fx.sharding.spmd import token_dispatch
    from mindspeed_fx.sharding.spmd.experts import BY_DIMENSION, is_rowwise

    chosen = choices(node.args[1])
    rows, order = ([u for u in node.users if u.args[1] == i] for i in (0, 1))
    region, pending, products, ends = set(), list(rows), [], []
    while pending:
        n = pending.pop()
        if n in region:
            continue
        region.add(n)
        for user in n.users:
            if user.target is ops.moe_unpermute.default and user.args[0] is n and user.args[1] in order:
                ends.append(user)
            elif user.target is ops.grouped_matmul.default and user.args[0] is n:
                products.append(user)
                pending.append(user)
            elif is_rowwise(user.target) or user.target in BY_DIMENSION:
                pending.append(user)
            else:
                raise _refusal(
                    user, f"{user.target} reads rows that are sorted by expert, and does not work row by row"
                )
    for reader in (u for o in order for u in o.users):
        if reader not in ends:
            raise _refusal(reader, f"{reader.target} reads the order of the rows that are sorted by expert")
    for product in products:
        counted = counts(product.args[2])
        if counted is None or counted[0] is not chosen or counted[1] != product.args[1].meta["val"].shape[0]:
            raise _refusal(product, "where the rows of each expert end is not counted from the choices that sort them")
    for product in products:
        with node.graph.inserting_before(product):
            new = node.graph.call_function(
                token_dispatch.ends, (node.args[1], counts(product.args[2])[1], product.args[2].meta["val"].dtype)
            )
        new.meta = {
            **{k: v for k, v in product.meta.items() if k in ("stack_trace", "nn_module_stack", "grad_enabled")},
            "val": product.args[2].meta["val"],
            "mutated": False,
        }
        product.args = (*product.args[:2], new)
    _meet_tables([n for n in node.graph.nodes if n in region], node.args[1])
    node.target = token_dispatch.permute_tokens
    for end in ends:
        end.target, end.args, end.kwargs = (
            token_dispatch.unpermute_tokens,
            (*end.args, *(None, 1)[len(end.args) - 2 :]) if len(end.args) < 4 else end.args,
            {},
        )
    report.rewrites.append(site("tokens sent to experts by all-to-all", node, [node, *products, *ends]))


def _meet_tables(region: list[fx.Node], indices: fx.Node) -> None:
    """Rows of a table by expert that meet ``region``, the rows sorted by ``indices``, are taken where those are."""
    from mindspeed_fx.sharding.spmd.rows_by_expert import rows_by_expert

    for n in region:
        rows = next((a for a in n.args if a in region), None)
        for other in [a for a in n.all_input_nodes if a not in region]:
            if rows is None or (taken := sorted_table(other, indices)) is None:
                continue
            table, casts = taken
            source = casts[0].args[0] if casts else other
            with n.graph.inserting_before(n):
                new = n.graph.call_function(rows_by_expert, (rows, table, indices))
                new.meta = dict(source.meta)
                for cast in casts:
                    new = n.graph.node_copy(cast, lambda _, x=new: x)
            n.replace_input_with(other, new)


def _refusal(node: fx.Node, why: str) -> ShardingError:
    return ShardingError(
        f'module "{module_path(node)}": tokens cannot be sent to their experts by all-to-all: {why}; '
        'plan "ep" gathers tokens instead'
    )


def counts(n: Any) -> tuple[Any, int] | None:
    """(choices, experts) when ``n`` is where the rows of each expert end: sums of counts, or counts of what is not
    larger.
    """
    n = _plain(n)
    if not isinstance(n, fx.Node):
        return None
    if n.target is aten.cumsum.default and n.args[1] in (0, -1):
        arg = _plain(n.args[0])
        if arg.target is aten.histc.default:
            x, bins, low, high = (*arg.args, *(100, 0, 0)[len(arg.args) - 1 :])[:4]
            return (choices(x), bins) if low == 0 and high == bins - 1 else None
    if n.target is aten.sum.dim_IntList and list(n.args[1]) == [0]:
        alternatives = _plain(n.args[0])
        if (
            alternatives.target is aten.le.Tensor
            and alternatives.args[1].target is aten.arange.default
            and len(alternatives.args[1].args) == 1
        ):
            return choices(alternatives.args[0]), alternatives.args[1].args[0]
    return None


def _plain(n: Any) -> Any:
    while isinstance(n, fx.Node) and n.target in (
        aten.to.dtype,
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
    ):
        n = n.args[0]
    return n
