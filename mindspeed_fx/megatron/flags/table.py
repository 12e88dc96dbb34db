"""The whole table: every flag of MindSpeed and MindSpeed-LLM, in the order of acting on Megatron's arguments."""

from __future__ import annotations

from mindspeed_fx.megatron.flags import (
    communication,
    deepspeed_moe,
    former_names,
    fusion,
    llm_data,
    llm_delta,
    llm_model,
    llm_parts,
    llm_sparse,
    llm_variants,
    memory,
    moe,
    optimizer,
    parallel,
    pipeline,
    precision,
    router,
    shared,
    tools,
    unaligned,
)
from mindspeed_fx.megatron.flags.flag import Flag

SUBJECTS: dict[str, list[Flag]] = {
    "Names of before": former_names.FLAGS,  # they give their value to a flag of today, so they come first
    "The model (MindSpeed-LLM)": llm_model.FLAGS,  # --spec before --first-k-dense-replace, which outweighs it
    "Parts of models (MindSpeed-LLM)": llm_parts.FLAGS,  # after --spec, which says what layers there are
    "Delta nets (MindSpeed-LLM)": llm_delta.FLAGS,
    "Sparse attention (MindSpeed-LLM)": llm_sparse.FLAGS,
    "Other models (MindSpeed-LLM)": llm_variants.FLAGS,
    "Experts": moe.FLAGS + deepspeed_moe.FLAGS,  # layers with experts before --noop-layers, which counts them
    "Communication": communication.FLAGS,
    "Routers": router.FLAGS,
    "Tensor, context and data parallelism": parallel.FLAGS + unaligned.FLAGS,
    "Pipeline": pipeline.FLAGS,
    "Memory": memory.FLAGS,
    "Fused operators and attention": fusion.FLAGS,
    "Optimizers": optimizer.FLAGS,
    "Precision": precision.FLAGS,
    "Tools": tools.FLAGS,
    "Data, weights and other tasks (MindSpeed-LLM)": llm_data.FLAGS,
    "In Megatron too": shared.FLAGS,
}
"""Subject -> rows, in the order of acting."""

TABLE: list[Flag] = [flag for rows in SUBJECTS.values() for flag in rows]

BY_KEY: dict[str, Flag] = {flag.key: flag for flag in TABLE}
"""By the flag, or by the flag and its added value."""


def parent_of(flag: Flag) -> Flag | None:
    """The flag that this one is a setting of."""
    return BY_KEY[flag.of] if flag.of is not None else None


def state_of(flag: Flag) -> str:
    """Its state, which for a setting is that of its flag."""
    parent = parent_of(flag)
    return flag.state if parent is None else parent.state
