"""``--hccl-op-mode``, ``--hccl-group-buffer`` and its adaptive form: options of HCCL for each of Megatron's groups.

Sizes are MiB of the buffer that HCCL has for a group, 200 by default; a mode says where HCCL expands an operator
(HCCL_OP_EXPANSION_MODE's numbers). On other devices than NPUs there is no HCCL, and the flags have no effect.

MindSpeed's names of groups are those of an older Megatron-core; ``NAMES`` has today's.
"""

from __future__ import annotations

import math
from argparse import Namespace

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.megatron.flags.flag import get

DEFAULT = "default_group"
"""The group of all ranks, which torch.distributed makes before Megatron's."""
NAMES = {"exp": "ep", "tp_exp": "ep_tp", "mp_exp": "tp_ep_mp", "dp_modulo_exp": "ep_dp"}
"""MindSpeed's name -> that of Megatron-core 0.16."""
GROUPS = (
    *("dp", "dp_cp", "cp", "mp", "tp", "pp", "embd", "tp_dp_cp", "tp_dp", "tp_cp", "ep", "ep_tp", "tp_ep_mp", "ep_dp"),
    *("tp_ep_pp", "pos_embd", "hcp", DEFAULT),
)
"""Groups of Megatron-core 0.16."""
MINDSPEEDS = (
    *("pp_new_stream", "cp2", "cp_ulysses", "cp_ring", "cp_ring_intra", "cp_ring_intra_overlap"),
    *("nd1_dim1", "ag_x_sd_rcv_overlap", "nd1_dim2", "ag_y_sd_rcv_overlap", "nd2_dim1", "nd2_dim2"),
)
"""Groups that MindSpeed makes beside them, and nobody here."""
USUAL, SMALL = 200, 10
"""MiB: HCCL's default, and that of groups that move a few numbers alone (MindSpeed's)."""


def parse(text: str, flag: str) -> dict[str, int]:
    """Group -> number, of "dp:200;tp:300" (or with commas).

    >>> parse("cp:2;exp:4", "--hccl-op-mode")
    {'cp': 2, 'ep': 4}

    Raises:
        OptionError: it is not of that form, or names a group that neither Megatron nor MindSpeed has.
    """
    result = {}
    for part in text.replace(",", ";").split(";"):
        name, _, number = (word.strip() for word in part.partition(":"))
        if not number.isdigit() or not int(number):
            raise OptionError(f"{flag} {text}: {part!r}; group:number is expected, as in dp:200;tp:300")
        name = NAMES.get(name, name)
        if name not in GROUPS + MINDSPEEDS:
            raise OptionError(f"{flag} {text}: {name!r} is no group{nearest(name, GROUPS)}; valid: {', '.join(GROUPS)}")
        result[name] = int(number)
    return result


def adaptive_sizes(args: Namespace) -> dict[str, int]:
    """MiB of the buffers of groups by the largest message of the model, in 16 bits.

    With e = S/C B H elements of a rank's part of the sequence: tp gathers e (reduces 2 e without sequence parallelism),
    pp sends e, over T with sequence parallelism, an exchange of experts moves k e / T times the given factor of
    imbalance, experts that gather move e E, Ulysses exchanges e / T, and a ring sends keys and values.
    """
    tensor, context = get(args, "tensor_model_parallel_size") or 1, get(args, "context_parallel_size") or 1
    elements = args.seq_length / context * args.micro_batch_size * args.hidden_size
    factor, parallel = get(args, "hccl_ep_group_buffer_adaptive_factor", -1.0), get(args, "sequence_parallel")
    sizes = dict.fromkeys(("mp", "tp_ep_mp", "tp_cp"), SMALL)
    sizes["tp"] = _mib(elements) * (1 if parallel else 2)
    sizes["pp"] = _mib(elements / (tensor if parallel else 1))
    sizes["ep"] = _mib(elements / tensor * (get(args, "moe_router_topk") or 1) * factor) if factor > 0 else USUAL
    if get(args, "moe_token_dispatcher_type", "allgather") == "allgather":
        ranks = get(args, "expert_model_parallel_size") or 1
        sizes["ep_tp"] = _mib(elements * ranks * factor) if factor > 0 else USUAL
    heads = get(args, "num_attention_heads") or 1
    exchanged, sent = elements / tensor, 2 * elements * (get(args, "num_query_groups") or heads) / heads / tensor
    algorithm = get(args, "context_parallel_algo") or "ulysses_cp_algo"
    is_ring = algorithm in ("megatron_cp_algo", "hybrid_cp_algo")
    sizes["cp"] = _mib(max(exchanged, sent) if algorithm == "hybrid_cp_algo" else sent if is_ring else exchanged)
    return sizes


def _mib(elements: float) -> int:
    """Of a buffer for so many 16-bit elements, in whole Mi of them."""
    return 2 * math.ceil(elements / 2**20)


def configurations(args: Namespace) -> dict[str, dict[str, int]]:
    """Group -> what HCCL is configured with for it, as the flags of a run have it."""
    result: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    if getattr(args, "hccl_group_buffer_adaptive", False):
        sizes |= adaptive_sizes(args)
    if getattr(args, "hccl_group_buffer", None):
        sizes |= parse(args.hccl_group_buffer, "--hccl-group-buffer")
    modes = parse(args.hccl_op_mode, "--hccl-op-mode") if getattr(args, "hccl_op_mode", None) else {}
    for name, size in sizes.items():
        result.setdefault(name, {})["hccl_buffer_size"] = size
    for name, mode in modes.items():
        result.setdefault(name, {})["hccl_op_expansion_mode"] = mode
    return result


def describe(config: dict[str, dict[str, int]], key: str) -> str:
    """What becomes of one of HCCL's settings."""
    numbers = {name: values[key] for name, values in config.items() if key in values}
    absent = [name for name in numbers if name in MINDSPEEDS + (DEFAULT,)]
    text = "options of HCCL's groups on an NPU: " + ", ".join(f"{k} {v}" for k, v in numbers.items() if k not in absent)
    return f"{text}; left to HCCL, for Megatron makes no such group: {', '.join(absent)}" if absent else text
