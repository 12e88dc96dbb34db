"""THE list: every pass of the package, in the order in which they run, and why each stands where it does.

A graph goes through the stages in order:

* ``captured``: before autograd, ATen operators in one spelling
* ``joint``: forward and backward in one graph
* ``partition``: decides what the forward saves, and rewrites nothing
* ``partitioned``: forward and backward, each on its own

A pass file registers the function of its row (``@register(NAME)``). A pass of the user's runs last in its stage, unless
it says before or after which it goes (:func:`in_order`). Which passes are in force is decided in :mod:`runner`.
"""

from __future__ import annotations

import graphlib
from typing import Any, NamedTuple, Sequence

from mindspeed_fx.errors import nearest

STAGES = ("captured", "joint", "partition", "partitioned")
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
    Entry("fusion.grouped_matmul",               "captured",    1, CLOSE, "products per expert, which nothing below "
                                                                          "takes apart"),
    Entry("fusion.moe_permute",                  "captured",    1, CLOSE, "sorted tokens, before anything reads their "
                                                                          "indexing as something else"),
    Entry("fusion.gathered_experts",             "captured",    1, CLOSE, "weights gathered per token, which "
                                                                          "moe_permute left"),
    Entry("canonicalize.autograd_function",      "captured",    1, CLOSE, "custom functions become plain operators "
                                                                          "that all below can read"),
    Entry("fusion.clipped_swiglu",               "captured",    1, CLOSE, "reads clamps and a gate that silu would "
                                                                          "take for itself"),
    Entry("canonicalize.gelu",                   "captured",    1, CLOSE, "one call for every spelling of GELU, for "
                                                                          "geglu and experts"),
    Entry("fusion.layer_norm",                   "captured",    1, CLOSE, "before rms_norm, which is what is left of "
                                                                          "it without a mean"),
    Entry("fusion.merged_linear",                "captured",    3, CLOSE, "before what reads the results of the layers "
                                                                          "it joins"),
    Entry("fusion.one_hot_dispatch",             "captured",    1, CLOSE, "one-hot products become rows at their places"),
    Entry("fusion.rms_norm",                     "captured",    1, CLOSE, "after layer_norm; before qk_norm_rope and "
                                                                          "the sums"),
    Entry("fusion.rope",                         "captured",    1, CLOSE, "before additions are joined with norms, "
                                                                          "which may read rotated halves"),
    Entry("fusion.add_layer_norm",               "captured",    1, CLOSE, "joins a residual addition with the "
                                                                          "layer_norm found above"),
    Entry("fusion.add_rms_norm",                 "captured",    1, CLOSE, "joins a residual addition with the rms_norm "
                                                                          "found above"),
    Entry("fusion.dropout_add",                  "captured",    1, EXACT, "after the sums with norms: an addition is "
                                                                          "joined once"),
    Entry("fusion.qk_norm_rope",                 "captured",    1, CLOSE, "joins the rms_norm and the rope found above"),
    Entry("canonicalize.silu",                   "captured",    1, CLOSE, "after clipped_swiglu, for swiglu"),
    Entry("canonicalize.softmax",                "captured",    1, CLOSE, "one softmax for attention and for losses"),
    Entry("fusion.attention",                    "captured",    1, CLOSE, "reads scores around the softmax"),
    Entry("fusion.cross_entropy",                "captured",    1, CLOSE, "reads picked log-probabilities of the "
                                                                          "softmax"),
    Entry("fusion.linear_cross_entropy",         "captured",    1, CLOSE, "joins the cross-entropy with the layer that "
                                                                          "makes the logits"),
    Entry("fusion.scaled_masked_softmax",        "captured",    1, CLOSE, "what attention left: weights that the model "
                                                                          "returns"),
    Entry("fusion.swiglu",                       "captured",    1, CLOSE, "reads the silu found above"),
    Entry("fusion.activation",                   "captured",    1, CLOSE, "activations that no gate has taken"),
    Entry("fusion.glu",                          "captured",    1, CLOSE, "gates other than swiglu's"),
    Entry("fusion.weighted_swiglu",              "captured",    1, CLOSE, "multiplies the swiglu found above by a "
                                                                          "weight per row"),
    Entry("canonicalize.npu_attention",          "captured",    0, EXACT, "calls of torch_npu's attention, told once "
                                                                          "fusion is done"),
    Entry("canonicalize.varlen_attention",       "captured",    0, CLOSE, "torch's varlen_attn becomes ours"),
    Entry("fusion.dropout_add_seeded",           "captured",    1, CLOSE, "the dropout_add found above, with a mask "
                                                                          "that is drawn and not stored"),
    Entry("sharding.constraint",                 "captured",    0, EXACT, "the plan's edges, on the operators that "
                                                                          "fusion made"),
    Entry("sharding.token_dispatch",             "captured",    0, EXACT, "the mixtures whose tokens travel, at their "
                                                                          "edges"),
    Entry("fusion.linear_cross_entropy_backward", "joint",      1, CLOSE, "needs the backward that autograd made"),
    Entry("sharding.regather",                   "joint",       0, EXACT, "marks gathers that the backward makes "
                                                                          "again, before they are judged"),
    Entry("sharding.verify",                     "joint",       0, EXACT, "reads the collectives of both directions"),
    Entry("recompute.budget",                    "partition",   0, EXACT, "a memory budget, if one is given"),
    Entry("recompute.pointwise",                 "partition",   2, EXACT, "on cpu, if neither budget nor policy is "
                                                                          "given"),
    Entry("recompute.policy",                    "partition",   0, EXACT, "a named policy, if one is given"),
    Entry("lowering.bool_collectives",           "partitioned", 0, EXACT, "before collectives are scheduled: they "
                                                                          "change type"),
    Entry("lowering.main_grad",                  "partitioned", 0, EXACT, "gradients written in place, before they are "
                                                                          "scheduled"),
    Entry("lowering.onednn",                     "partitioned", 1, CLOSE, "weight gradients, before products are "
                                                                          "divided"),
    Entry("overlap.split",                       "partitioned", 2, EXACT, "frees the two products of a linear's "
                                                                          "backward to move apart"),
    Entry("overlap.mc2",                         "partitioned", 2, CLOSE, "a product and its collective in one "
                                                                          "operator, before chunks are tried"),
    Entry("overlap.mc2_experts",                 "partitioned", 2, CLOSE, "the same for the products of experts"),
    Entry("overlap.step",                        "partitioned", 0, EXACT, "optimizer steps in place, before they are "
                                                                          "bucketed"),
    Entry("overlap.symmetric_memory",            "partitioned", 2, CLOSE, "mc2 of torch on cuda"),
    Entry("overlap.decompose",                   "partitioned", 2, CLOSE, "products and collectives in chunks"),
    Entry("overlap.bucket",                      "partitioned", 2, EXACT, "collectives that go together, after chunks "
                                                                          "are settled"),
    Entry("overlap.schedule",                    "partitioned", 2, EXACT, "the order of all that is there now"),
    Entry("sharding.recognize",                  "partitioned", 0, EXACT, "reads what is sent in the end"),
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
    found = []
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
        found += [by_name[name] for name in _sorted(waits, [p.name for p in mine])]
    return found


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


def _sorted(waits: dict[str, set[str]], preferred: list[str]) -> list[str]:
    """Topological order; of those that are free the first in ``preferred``."""
    sorter = graphlib.TopologicalSorter(waits)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise PassError(f"passes wait for each other in a circle: {', '.join(error.args[1])}") from None
    free, found = set(), []
    while sorter.is_active():
        free.update(sorter.get_ready())
        first = min(free, key=preferred.index)
        free.remove(first)
        sorter.done(first)
        found.append(first)
    return found
