"""Passes by what users call what they rewrite: the kinds of sites that reports count, and the families of rewrites that
are measured apart."""

from __future__ import annotations

from typing import Mapping

KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("fusion.attention", "fusion.scaled_masked_softmax"),
    "norms": ("fusion.rms_norm", "fusion.layer_norm"),
    "rotations": ("fusion.rope", "fusion.qk_norm_rope"),
    "gates": ("fusion.swiglu", "fusion.glu", "fusion.clipped_swiglu", "fusion.weighted_swiglu"),
    "activations": ("fusion.activation",),
    "experts": ("fusion.grouped_matmul", "fusion.moe_permute", "fusion.gathered_experts", "fusion.one_hot_dispatch"),
    "losses": ("fusion.cross_entropy",),
}
"""What users call the sites, and the passes that find each once; others rewrite what these have made."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    **KINDS,
    "attention": (
        *KINDS["attention"],
        "fusion.gated_delta_rule",
        "fusion.kimi_delta_attention",
        "fusion.ssd",
        "fusion.selective_scan",
        "canonicalize.npu_attention",
        "canonicalize.varlen_attention",
    ),
    "norms": (*KINDS["norms"], "fusion.add_rms_norm", "fusion.add_layer_norm"),
    "experts": (*KINDS["experts"], "fusion.router_topk"),
    "rotations": (*KINDS["rotations"], "lowering.rope_pairs", "lowering.angle_tables"),
    "losses": (*KINDS["losses"], "fusion.linear_cross_entropy", "fusion.linear_cross_entropy_backward"),
    "convolutions": ("fusion.causal_conv1d",),
    "hyper-connections": ("fusion.sinkhorn_knopp",),
    "dropout": ("fusion.dropout_add", "fusion.dropout_add_seeded"),
    "joined layers": ("fusion.merged_linear",),
    "products": ("lowering.onednn", "lowering.narrow_products"),
    "recomputation": ("recompute.budget", "recompute.pointwise", "recompute.policy"),
    "overlap": (
        "overlap.split",
        "overlap.mc2",
        "overlap.mc2_experts",
        "overlap.symmetric_memory",
        "overlap.decompose",
        "overlap.bucket",
        "overlap.schedule",
    ),
}
"""Family -> its passes. What joins the sites of a family belongs to it, and so does what would take its sites instead:
off, all are off."""

SUPPORTING = (
    "canonicalize.autograd_function",
    "canonicalize.batched_arithmetic",
    "canonicalize.expert_loop",
    "canonicalize.filled_buffers",
    "canonicalize.forward_substitution",
    "canonicalize.gelu",
    "canonicalize.row_layout",
    "canonicalize.silu",
    "canonicalize.softmax",
    "canonicalize.stacked_rows",
    "lowering.bool_collectives",
    "lowering.joined_slices",
    "lowering.main_grad",
    "lowering.repeated_layers",
    "lowering.saved_masks",
    "lowering.narrow_indices",
    "lowering.shared_sums",
    "lowering.compared_elements",
    "lowering.split_cat",
    "overlap.step",
    "sharding.constraint",
    "sharding.recognize",
    "sharding.regather",
    "sharding.token_dispatch",
    "sharding.verify",
)
"""Passes that buy no step time: spellings that families read, what a plan or an option asks for, what a graph needs in
order to run, and faster compiling."""


def active_families(counts: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The families that rewrote something, each with all of its passes; a pass of the user's is a family of its own.

    Args:
        counts: pass name -> rewrites.
    """
    own = {name: (name,) for name in counts if name not in SUPPORTING and not any(name in f for f in FAMILIES.values())}
    return {
        family: passes for family, passes in {**FAMILIES, **own}.items() if sum(counts.get(name, 0) for name in passes)
    }
