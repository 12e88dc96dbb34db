"""Routers of MindSpeed-LLM, in the words of Megatron's: the same choice of experts and the same weights, or an error.

Megatron: probabilities p of a softmax (before the choice of k experts with ``moe_router_pre_softmax``, over the chosen
k without) or of sigmoids divided by their sum, times ``moe_router_topk_scaling_factor``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import MEGATRON, OPTION, REFUSED, Flag, NotDone, added, get, number, switch

TYPE = "--moe-router-load-balancing-type"
GROUP_LIMITED = "group_limited_greedy"
DEVICE_LOSSES = ("moe_device_level_aux_loss_coeff", "moe_comm_aux_loss_coeff")


def _is_plain(args: Namespace, kind: str) -> None:
    """Refuses what the routers of MindSpeed-LLM leave out and Megatron would add."""
    if get(args, "moe_router_score_function", "softmax") != "softmax":
        raise NotDone(f"{kind} is a softmax; remove --moe-router-score-function")
    if get(args, "moe_router_enable_expert_bias"):
        raise NotDone(f"Megatron's softmax router has no expert bias; remove --moe-router-enable-expert-bias or {kind}")
    if get(args, "moe_expert_capacity_factor") is not None:
        raise NotDone(f"{kind} drops no token; remove --moe-expert-capacity-factor")


def drop_unread_bias(args: Namespace) -> str | None:
    """Megatron refuses a bias of experts with softmax scores; MindSpeed-LLM keeps one, which no choice reads."""
    if not get(args, "moe_router_enable_expert_bias") or get(args, "moe_router_score_function") not in (
        None,
        "softmax",
    ):
        return None
    args.moe_router_enable_expert_bias = False
    return "moe_router_enable_expert_bias = False: softmax scores are chosen without it in MindSpeed-LLM"


def _set(args: Namespace, **values: Any) -> str:
    for name, value in values.items():
        setattr(args, name, value)
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _softmax_topk(args: Namespace) -> str:
    """softmax over all experts, the k largest, divided by their sum with --norm-topk-prob; no auxiliary loss.

    Dividing the k largest of softmax(l) by their sum is the softmax over their k logits.
    """
    if get(args, "moe_router_enable_expert_bias") or get(args, "num_zero_experts"):
        return _biased_softmax(args)
    _is_plain(args, "softmax_topk")
    before = not get(args, "norm_topk_prob")
    return _set(
        args,
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=before,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
    )


def _biased_softmax(args: Namespace) -> str:
    """The k largest of softmax plus a bias (:mod:`mindspeed_fx.megatron.zero_experts`), as LongCat has them."""
    has_bias = bool(get(args, "moe_router_enable_expert_bias"))
    args.moe_router_enable_expert_bias = False  # Megatron's configuration refuses it beside a softmax
    _is_plain(args, "softmax_topk")
    for name in ("norm_topk_prob", "moe_shared_expert_intermediate_size"):
        if get(args, name):
            raise NotDone(f"beside a bias of experts or --num-zero-experts: remove --{name.replace('_', '-')}")
    return _set(
        args,
        moe_router_load_balancing_type="none",
        biased_softmax=True,
        softmax_has_expert_bias=has_bias,
        moe_router_pre_softmax=True,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
    )


def _zero_experts(args: Namespace) -> str:
    if not get(args, "num_experts"):
        return "no effect without experts"
    if not get(args, "biased_softmax") and get(args, "moe_router_load_balancing_type") != "softmax_topk":
        raise NotDone(f"the choice among them is that of {TYPE} softmax_topk; give it")
    if get(args, "moe_latent_size"):
        raise NotDone("they add the token itself; remove --moe-latent-size")
    return f"the router has {args.num_zero_experts} rows more"


def _sparse_mixer(args: Namespace) -> str:
    """Two experts by :mod:`mindspeed_fx.megatron.sparse_mixer`; groups, scale and auxiliary losses are not read."""
    _is_plain(args, "sparsemixer_topk")
    if get(args, "moe_router_topk", 2) != 2:
        raise NotDone("sparsemixer_topk chooses two experts; give --moe-router-topk 2")
    return _set(
        args,
        moe_router_load_balancing_type="none",
        sparse_mixer=True,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
    )


def _pai(args: Namespace) -> str:
    """softmax over all experts, the k largest as they are; the switch loss; groups and scale are not read."""
    _is_plain(args, "pai_megatron_aux_loss")
    return _set(
        args,
        moe_router_load_balancing_type="aux_loss",
        moe_router_pre_softmax=True,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
    )


def _group_limited(args: Namespace) -> str:
    """DeepSeek-V2's router (:mod:`mindspeed_fx.megatron.group_limited_router`)."""
    _is_plain(args, "group_limited_greedy")
    experts, chosen = get(args, "num_experts"), get(args, "moe_router_group_topk")
    number = get(args, "moe_router_num_groups") or get(args, "expert_model_parallel_size", 1)
    if not experts:
        return "no effect without experts"
    if chosen is None or get(args, "moe_router_topk_scaling_factor") is None:
        raise NotDone("as in MindSpeed-LLM it needs --moe-router-group-topk and --moe-router-topk-scaling-factor")
    if experts % number or chosen > number or get(args, "moe_router_topk", 2) > experts // number * chosen:
        raise NotDone(
            f"{experts} experts in {number} groups (--moe-router-num-groups, or the ranks of experts), of which a "
            f"token sees {chosen}: give groups of one size, no more for a token than there are, and as many experts in "
            "them as --moe-router-topk"
        )
    has_sum = get(args, "norm_topk_prob") and get(args, "moe_router_topk", 2) > 1
    coefficients = [get(args, name, 0.0) or 0.0 for name in ("moe_aux_loss_coeff", *DEVICE_LOSSES)]
    args.group_limited = (
        number,
        chosen,
        None if has_sum else args.moe_router_topk_scaling_factor,
        tuple(coefficients),
        bool(args.seq_aux),
    )
    said = _set(
        args,
        moe_router_load_balancing_type="aux_loss",
        moe_router_pre_softmax=True,  # not read; Megatron refuses one expert without it
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
    )
    return f"{chosen} of {number} groups by their best expert; {said}"


def _normalize(args: Namespace) -> str:
    """--norm-topk-prob: the weights of the k experts add up to 1, also where a scale was given."""
    kind = get(args, "moe_router_load_balancing_type", "aux_loss")
    if kind in ("softmax_topk", GROUP_LIMITED) or get(args, "group_limited"):
        return f"read by {GROUP_LIMITED if kind != 'softmax_topk' else kind}"
    if kind != "aux_loss":
        return f"type {kind} does not read it, as in MindSpeed-LLM"
    if get(args, "moe_expert_capacity_factor") is not None:
        raise NotDone("with --moe-expert-capacity-factor it divides by what was not dropped; remove one of the two")
    if get(args, "moe_router_score_function", "softmax") == "sigmoid" and get(args, "moe_router_topk", 2) == 1:
        raise NotDone("with one expert and sigmoid its weight is 1 and has no gradient; remove the flag")
    return _set(args, moe_router_pre_softmax=False, moe_router_topk_scaling_factor=None)


def _sequence_loss(args: Namespace) -> str:
    """--seq-aux is read by types none and group_limited_greedy."""
    kind = get(args, "moe_router_load_balancing_type", "aux_loss")
    if kind == GROUP_LIMITED or get(args, "group_limited"):
        return f"read by {GROUP_LIMITED}"
    if kind != "none":
        return f"type {kind} does not read it, as in MindSpeed-LLM"
    if not get(args, "moe_aux_loss_coeff"):
        return "its coefficient is 0: no loss"
    note = "over the whole of each sequence, as DeepSeek-V3 defines it; MindSpeed-LLM counts a rank's own tokens"
    return f"{_set(args, moe_router_load_balancing_type='seq_aux_loss')}: {note}"


def _float32_softmax(args: Namespace) -> str:
    """--topk-softmax-in-fp32: of logits before the largest k are taken; aux_loss returns to the type of the logits."""
    kind = get(args, "moe_router_load_balancing_type", "aux_loss")
    if get(args, "moe_router_score_function", "softmax") != "softmax":
        return "no effect without softmax"
    if kind in ("softmax_topk", GROUP_LIMITED) or get(args, "group_limited"):
        return f"type {kind} does not read it, as in MindSpeed-LLM"
    if _is_wide(args):
        return "the router computes in float32: the softmax too"
    if kind == "aux_loss" and get(args, "norm_topk_prob"):
        return "the weights of the chosen are one softmax in float32, rounded once"
    if not get(args, "moe_router_pre_softmax"):
        return "no effect without --moe-router-pre-softmax, as in MindSpeed-LLM"
    return _set(args, router_softmax_in_fp32="rounded" if kind == "aux_loss" else "kept")


def _float32_choice(args: Namespace) -> str:
    """--moe-revert-type-after-topk: read by softmax_topk, whose weights it leaves in float32."""
    if get(args, "moe_router_load_balancing_type", "aux_loss") != "softmax_topk":
        return "read by softmax_topk alone, as in MindSpeed-LLM"
    if _is_wide(args):
        return "the router computes in float32: the weights too"
    return _set(args, router_softmax_in_fp32="kept")


def _is_wide(args: Namespace) -> bool:
    return bool(get(args, "moe_router_dtype") in ("fp32", "fp64") or get(args, "router_gating_in_fp32"))


def _no_loss(attribute: str) -> Any:
    def act(args: Namespace) -> str:
        if not getattr(args, attribute):
            return "its coefficient is 0: no loss"
        if get(args, "moe_router_load_balancing_type") == GROUP_LIMITED or get(args, "group_limited"):
            return f"read by {GROUP_LIMITED}"
        raise NotDone(f"{GROUP_LIMITED} alone has a loss over devices; remove it, or give {TYPE} {GROUP_LIMITED}")

    return act


def _alltoall(args: Namespace) -> str:
    result = _set(args, moe_token_dispatcher_type="alltoall")
    if get(args, "tensor_model_parallel_size", 1) == 1 or get(args, "moe_expert_capacity_factor") is None:
        return result
    if not get(args, "sequence_parallel"):
        raise NotDone("with a capacity and tensor parallelism it needs --sequence-parallel, as in MindSpeed")
    # Padding moves zeros alone, and a rank may hold more or fewer of an expert's tokens than its share.
    shared = _set(args, capacity_over_sequence=True, moe_pad_expert_input_to_capacity=False)
    return f"{result}, {shared}: capacity counts the tokens of all tensor-parallel ranks"


FLAGS: list[Flag] = [
    switch(
        "--norm-topk-prob",
        MEGATRON,
        "the weights of a token's experts add up to 1",
        "softmax over the chosen experts (no `--moe-router-pre-softmax`), no scale; other types do not read it",
        act=_normalize,
        shown_by="test_routers",
        llm=True,
    ),
    switch(
        "--seq-aux",
        MEGATRON,
        "beside type none: a loss for each sequence",
        "beside type none `--moe-router-load-balancing-type seq_aux_loss`; not read by other types",
        act=_sequence_loss,
        llm=True,
    ),
    switch(
        "--router-gating-in-fp32",
        MEGATRON,
        "the router's product in float32",
        "`--moe-router-dtype fp32`",
        act=lambda args: _set(args, moe_router_dtype="fp32"),
        llm=True,
    ),
    switch(
        "--topk-softmax-in-fp32",
        MEGATRON,
        "the router's softmax before the choice stays in float32",
        "logits enter the choice in float32; type aux_loss rounds the weights, as in MindSpeed-LLM",
        act=_float32_softmax,
        shown_by="test_softmax_of_routers.py::test_softmax_in_float32",
        llm=True,
    ),
    switch(
        "--moe-revert-type-after-topk",
        MEGATRON,
        "softmax_topk chooses in float32, and its weights stay so",
        "logits enter the choice in float32",
        act=_float32_choice,
        shown_by="test_softmax_of_routers.py::test_softmax_in_float32",
        llm=True,
    ),
    number(
        "--moe-device-level-aux-loss-coeff",
        0.0,
        OPTION,
        "a loss over devices",
        "that of type group_limited_greedy; an error above 0 with another",
        act=_no_loss("moe_device_level_aux_loss_coeff"),
        llm=True,
    ),
    number(
        "--moe-comm-aux-loss-coeff",
        0.0,
        OPTION,
        "a loss over messages",
        "that of type group_limited_greedy; an error above 0 with another",
        act=_no_loss("moe_comm_aux_loss_coeff"),
        llm=True,
    ),
    switch(
        "--use-global-aux-loss",
        REFUSED,
        "one loss over all layers",
        f"give {TYPE} global_aux_loss, whose means are over batches",
        llm=True,
    ),
    number(
        "--num-zero-experts",
        None,
        OPTION,
        "experts that return their input",
        "rows of the router for experts that add their weight times the token, on its own rank; an error with another "
        "router than softmax_topk",
        act=_zero_experts,
        shown_by="test_longcat.py::test_experts_by_formula",
        llm=True,
    ),
    added(
        "--moe-token-dispatcher-type",
        "alltoall_seq",
        MEGATRON,
        "tokens of the whole sequence are exchanged",
        "`alltoall`: the same tokens to the same experts; a capacity counts the tokens of all tensor-parallel ranks",
        act=_alltoall,
        shown_by="test_capacity.py::test_capacity_of_the_whole_sequence",
    ),
    added(
        TYPE,
        "softmax_topk",
        MEGATRON,
        "softmax, then the largest k, without a loss",
        "type none with `--moe-router-pre-softmax`, or without it beside --norm-topk-prob",
        act=_softmax_topk,
        shown_by="test_routers",
        llm=True,
    ),
    added(
        TYPE,
        "pai_megatron_aux_loss",
        MEGATRON,
        "softmax, then the largest k, with the switch loss; groups and scale are not read",
        "type aux_loss with `--moe-router-pre-softmax`, without groups and scale",
        act=_pai,
        shown_by="test_routers",
        llm=True,
    ),
    added(
        TYPE,
        GROUP_LIMITED,
        OPTION,
        "groups chosen by their best expert, losses over devices and messages",
        "routers that choose so (megatron.group_limited_router); groups are --moe-router-num-groups, or the ranks of "
        "experts; losses count the tokens of all ranks that share a sequence, MindSpeed-LLM's a rank's own",
        act=_group_limited,
        shown_by="test_group_limited.py::test_a_router_by_formula",
        llm=True,
    ),
    added(
        TYPE,
        "sparsemixer_topk",
        OPTION,
        "two experts drawn at random by masked softmaxes",
        "type none, whose routers draw so (megatron.sparse_mixer)",
        act=_sparse_mixer,
        shown_by="test_phi_and_plm.py::test_sparse_mixer",
        llm=True,
    ),
    added("--moe-router-dtype", "fp8", REFUSED, "the router's product in 8 bits", "use --moe-router-dtype fp32"),
]
"""Rows of the table."""
