"""THE list: every pass of the package, in the order in which they run, and why each stands where it does.

A graph goes through the stages in order:

* ``captured``: before autograd, ATen operators in one spelling
* ``joint``: forward and backward in one graph
* ``partition``: decides what the forward saves, and rewrites nothing
* ``partitioned``: forward and backward, each on its own
* ``lowered``: the same, with kernels in place of fused operators

A pass file registers the function of its row (``@register(NAME)``). A pass of the user's runs last in its stage, unless
it says before or after which it goes (:func:`in_order`). Which passes are in force is decided in :mod:`runner`.
"""

from __future__ import annotations

import graphlib
from typing import Any, NamedTuple, Sequence

from mindspeed_fx.errors import nearest

STAGES = ("captured", "joint", "partition", "partitioned", "lowered")
EXACT, CLOSE = True, False
"""Outputs and gradients stay bitwise equal; or equal within the rounding of the operators."""


class PassError(ValueError):
    """A pass that is declared wrongly, named wrongly, cannot be ordered, or did not keep its contract."""


class Entry(NamedTuple):
    """A row of the list."""

    name: str
    stage: str
    level: int
    """The lowest optimization level that turns it on; 3: on request only."""
    exact: bool
    why: str
    """Why it stands where it does."""


# fmt: off
PASSES = (
    Entry("canonicalize.expert_loop",            "captured",    0, CLOSE, "first: no other reads rows that are data"),
    Entry("canonicalize.forward_substitution",   "captured",    1, CLOSE, "systems whole, for the delta rules"),
    Entry("fusion.gated_delta_rule",             "captured",    1, CLOSE, "chunks whole, before norms are read"),
    Entry("fusion.kimi_delta_attention",         "captured",    1, CLOSE, "chunks whole, before norms are read"),
    Entry("fusion.ssd",                          "captured",    1, CLOSE, "chunks whole, before norms are read"),
    Entry("fusion.selective_scan",               "captured",    1, CLOSE, "states whole, before others read products"),
    Entry("canonicalize.batched_arithmetic",     "captured",    0, EXACT, "vmapped sums of the scans that are left"),
    Entry("canonicalize.filled_buffers",         "captured",    1, EXACT, "scans' buffers are read; others are joined"),
    Entry("fusion.sinkhorn_knopp",               "captured",    1, CLOSE, "240 nodes less for all below to read"),
    Entry("fusion.grouped_matmul",               "captured",    1, CLOSE, "products per expert stay whole below"),
    Entry("fusion.moe_permute",                  "captured",    1, CLOSE, "sorted tokens, before others misread them"),
    Entry("fusion.gathered_experts",             "captured",    1, CLOSE, "weights per token, which moe_permute left"),
    Entry("canonicalize.autograd_function",      "captured",    1, CLOSE, "spells out custom functions for all below"),
    Entry("fusion.clipped_swiglu",               "captured",    1, CLOSE, "clamps and a gate, before silu takes it"),
    Entry("canonicalize.gelu",                   "captured",    1, CLOSE, "one spelling of GELU for geglu and experts"),
    Entry("canonicalize.row_layout",             "captured",    1, CLOSE, "before norms, which keep a sum's order"),
    Entry("fusion.layer_norm",                   "captured",    1, CLOSE, "before rms_norm: the same without a mean"),
    Entry("fusion.merged_linear",                "captured",    3, CLOSE, "before what reads the layers it joins"),
    Entry("fusion.one_hot_dispatch",             "captured",    1, CLOSE, "one-hot products become indexed rows"),
    Entry("fusion.rms_norm",                     "captured",    1, CLOSE, "after layer_norm, before what joins it"),
    Entry("fusion.rope",                         "captured",    1, CLOSE, "before norms join sums of rotated halves"),
    Entry("fusion.add_layer_norm",               "captured",    1, CLOSE, "a residual sum and the layer_norm above"),
    Entry("fusion.add_rms_norm",                 "captured",    1, CLOSE, "a residual sum and the rms_norm above"),
    Entry("fusion.dropout_add",                  "captured",    1, EXACT, "after norms: an addition is joined once"),
    Entry("fusion.qk_norm_rope",                 "captured",    1, CLOSE, "joins the rms_norm and rope found above"),
    Entry("canonicalize.silu",                   "captured",    1, CLOSE, "after clipped_swiglu, for swiglu"),
    Entry("fusion.causal_conv1d",                "captured",    1, CLOSE, "after silu, which it takes in"),
    Entry("canonicalize.stacked_rows",           "captured",    1, CLOSE, "rows at once, for softmax and losses"),
    Entry("canonicalize.softmax",                "captured",    1, CLOSE, "one softmax for attention and for losses"),
    Entry("fusion.router_topk",                  "captured",    1, CLOSE, "reads one softmax, or a sigmoid"),
    Entry("fusion.attention",                    "captured",    1, CLOSE, "reads scores around the softmax"),
    Entry("fusion.cross_entropy",                "captured",    1, CLOSE, "picked log-probabilities of the softmax"),
    Entry("fusion.linear_cross_entropy",         "captured",    1, CLOSE, "joins cross-entropy and the logits' layer"),
    Entry("fusion.scaled_masked_softmax",        "captured",    1, CLOSE, "what attention left: returned weights"),
    Entry("fusion.swiglu",                       "captured",    1, CLOSE, "reads the silu found above"),
    Entry("fusion.activation",                   "captured",    1, CLOSE, "activations that no gate has taken"),
    Entry("fusion.glu",                          "captured",    1, CLOSE, "gates other than swiglu's"),
    Entry("fusion.weighted_swiglu",              "captured",    1, CLOSE, "the swiglu above, times a weight per row"),
    Entry("canonicalize.npu_attention",          "captured",    0, EXACT, "torch_npu's attention, once fusion is done"),
    Entry("canonicalize.varlen_attention",       "captured",    0, CLOSE, "torch's varlen_attn becomes ours"),
    Entry("fusion.dropout_add_seeded",           "captured",    1, CLOSE, "dropout_add with a mask drawn, not stored"),
    Entry("sharding.constraint",                 "captured",    0, EXACT, "the plan's edges, on what fusion made"),
    Entry("sharding.token_dispatch",             "captured",    0, EXACT, "edges of mixtures by all-to-all"),
    Entry("lowering.split_cat",                  "joint",       1, EXACT, "first: fewer nodes for all below to read"),
    Entry("fusion.linear_cross_entropy_backward", "joint",      1, CLOSE, "needs the backward that autograd made"),
    Entry("lowering.narrow_indices",             "joint",       1, EXACT, "before the partition, which keeps them"),
    Entry("sharding.regather",                   "joint",       0, EXACT, "marks gathers to recompute, before verify"),
    Entry("sharding.verify",                     "joint",       0, EXACT, "reads the collectives of both directions"),
    Entry("recompute.budget",                    "partition",   0, EXACT, "a memory budget, if one is given"),
    Entry("recompute.pointwise",                 "partition",   2, EXACT, "on cpu, without a budget or a policy"),
    Entry("recompute.policy",                    "partition",   0, EXACT, "a named policy, if one is given"),
    Entry("lowering.saved_masks",                "partition",   1, EXACT, "of what those above save, masks as bytes"),
    Entry("lowering.bool_collectives",           "partitioned", 0, EXACT, "collectives change type before scheduling"),
    Entry("lowering.main_grad",                  "partitioned", 0, EXACT, "in-place gradients, before scheduling"),
    Entry("lowering.onednn",                     "partitioned", 1, CLOSE, "weight gradients, while products are whole"),
    Entry("lowering.narrow_products",            "partitioned", 1, CLOSE, "as lowering.onednn, for 16-bit types"),
    Entry("lowering.joined_slices",              "partitioned", 1, EXACT, "gradients of parts are one tensor"),
    Entry("lowering.rope_pairs",                 "partitioned", 1, CLOSE, "queries and keys by one launch"),
    Entry("lowering.angle_tables",               "partitioned", 1, EXACT, "after rope_pairs, which reads the angles"),
    Entry("lowering.shared_sums",                "partitioned", 0, EXACT, "a copy is cheaper than a second sum"),
    Entry("lowering.compared_elements",          "partitioned", 0, EXACT, "both sides rounded, in either direction"),
    Entry("overlap.split",                       "partitioned", 2, EXACT, "frees a linear's two backward products"),
    Entry("overlap.mc2",                         "partitioned", 2, CLOSE, "product and collective fused before chunks"),
    Entry("overlap.mc2_experts",                 "partitioned", 2, CLOSE, "the same for the products of experts"),
    Entry("overlap.step",                        "partitioned", 0, EXACT, "in-place optimizer steps, before bucketing"),
    Entry("overlap.symmetric_memory",            "partitioned", 2, CLOSE, "mc2 of torch on cuda"),
    Entry("overlap.decompose",                   "partitioned", 2, CLOSE, "products and collectives in chunks"),
    Entry("overlap.bucket",                      "partitioned", 2, EXACT, "small collectives joined, after chunks"),
    Entry("overlap.schedule",                    "partitioned", 2, EXACT, "the order of all that is left"),
    Entry("sharding.recognize",                  "partitioned", 0, EXACT, "reads what is sent in the end"),
    Entry("lowering.repeated_layers",            "lowered",     2, CLOSE, "last: layers are whole, code comes next"),
)
# fmt: on

ROWS = {row.name: row for row in PASSES}


def in_order(passes: Sequence[Any]) -> list[Any]:
    """``passes`` in the order in which they run: the list's, and each of the user's last in its stage or where it says.

    Args:
        passes: objects with ``name``, ``stage``, ``before`` and ``after`` (names of passes of the same stage).

    Raises:
        PassError: ``before`` or ``after`` names no pass, or one of another stage; passes wait for each other in a
            circle.
    """
    by_name = {p.name: p for p in passes}
    place = {row.name: i for i, row in enumerate(PASSES)}
    results = []
    for stage in STAGES:
        mine = sorted((p for p in passes if p.stage == stage), key=lambda p: (place.get(p.name, len(place)), p.name))
        listed = [p.name for p in mine if p.name in place]
        waits: dict[str, set[str]] = {p.name: set() for p in mine}
        for earlier, later in zip(listed, listed[1:]):
            waits[later].add(earlier)
        for p in mine:
            for other in p.before:
                waits[_same_stage(p, other, by_name, "before")].add(p.name)
            for other in p.after:
                waits[p.name].add(_same_stage(p, other, by_name, "after"))
        results += [by_name[name] for name in _topological_order(waits, [p.name for p in mine])]
    return results


def _same_stage(p: Any, other: str, by_name: dict[str, Any], word: str) -> str:
    if other not in by_name:
        raise PassError(
            f'pass "{p.name}" goes {word} "{other}", and there is no such pass{nearest(other, list(by_name))}'
        )
    if by_name[other].stage != p.stage:
        raise PassError(
            f'pass "{p.name}" of stage "{p.stage}" goes {word} "{other}", which is of stage "{by_name[other].stage}"'
        )
    return other


def _topological_order(waits: dict[str, set[str]], preferred: list[str]) -> list[str]:
    """Topological order; of those that are free the first in ``preferred``."""
    sorter = graphlib.TopologicalSorter(waits)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise PassError(f"passes wait for each other in a circle: {', '.join(error.args[1])}") from None
    free: set[str] = set()
    results: list[str] = []
    while sorter.is_active():
        free.update(sorter.get_ready())
        first = min(free, key=preferred.index)
        free.remove(first)
        sorter.done(first)
        results.append(first)
    return results
