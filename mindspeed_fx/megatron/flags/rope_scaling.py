"""``--rope-scaling-type``: Megatron's own where it has it, else what :mod:`mindspeed_fx.megatron.rope_scaling` sets."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import NotDone, get


def _yarn(args: Namespace) -> str:
    """YaRN of latent attention: Megatron's frequencies, factor of cosines and scale of the softmax are the same.

    inv = inv_inter (1 - m) + inv_extra m with m from beta_fast, beta_slow and the original length; cosines times
    g(s, mscale) / g(s, mscale_all_dim) and the softmax times g(s, mscale_all_dim)^2, g(s, a) = 0.1 a ln s + 1.
    """
    length = get(args, "rope_scaling_original_max_position_embeddings")
    if length is None:
        raise NotDone("give --rope-scaling-original-max-position-embeddings")
    if not get(args, "multi_latent_attention"):
        return _set_frequencies(args, "yarn")
    args.rope_type = "yarn"
    args.rotary_scaling_factor = get(args, "rope_scaling_factor", 8.0)
    args.original_max_position_embeddings = length
    args.mscale, args.mscale_all_dim = args.rope_scaling_mscale, args.rope_scaling_mscale_all_dim or 0.0
    return f"rope_type = yarn, rotary_scaling_factor = {args.rotary_scaling_factor}, original length {length}"


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "llama3_original_max_position_embeddings": 8192.0}
"""What Megatron's --use-rope-scaling has fixed (RotaryEmbedding._apply_scaling)."""


def _llama3(args: Namespace) -> str:
    held = {name: get(args, name) for name in LLAMA3}
    if held != LLAMA3:
        raise NotDone(
            "Megatron's --use-rope-scaling is fixed to --low-freq-factor 1 --high-freq-factor 4 "
            f"--original-max-position-embeddings 8192, and these are {list(held.values())}"
        )
    args.use_rope_scaling = True
    return f"use_rope_scaling = True, rope_scaling_factor = {get(args, 'rope_scaling_factor', 8.0)}"


def _longrope(args: Namespace) -> str:
    """Each frequency divided by a number of its own: see :mod:`mindspeed_fx.megatron.rope_scaling`."""
    if get(args, "multi_latent_attention"):
        raise NotDone("Megatron's latent attention takes no such frequencies; remove --multi-latent-attention")
    for name in ("long_factor", "short_factor", "rope_scaling_original_max_position_embeddings"):
        if get(args, name) is None:
            raise NotDone(f"give --{name.replace('_', '-')}")
    if bool(get(args, "long_mscale")) != bool(get(args, "short_mscale")):
        raise NotDone("give --long-mscale and --short-mscale, or neither")
    return _set_frequencies(args, "longrope")


def _plm(args: Namespace) -> str:
    """base^(-2 i / d) with d the rotated width of a latent head, else hidden size over heads: plain rotation."""
    if get(args, "rotary_percent", 1.0) != 1.0:
        raise NotDone("plm rotates whole heads; remove --rotary-percent")
    if get(args, "multi_latent_attention"):
        args.rope_type = "rope"
        return "rope_type = rope: the frequencies of plm are plain"
    if get(args, "kv_channels") not in (None, args.hidden_size // args.num_attention_heads):
        raise NotDone("plm rotates by the hidden size over the number of heads; remove --kv-channels")
    return "the frequencies of plm are plain"


def _set_frequencies(args: Namespace, kind: str) -> str:
    if get(args, "position_embedding_type") != "rope":
        raise NotDone("give --position-embedding-type rope")
    args.scaled_rotation = kind
    return f"frequencies of {kind}, original length {args.rope_scaling_original_max_position_embeddings}"


def set_scaling(args: Namespace) -> str:
    """The act of ``--rope-scaling-type``."""
    kinds = {"yarn": _yarn, "llama3": _llama3, "longrope": _longrope, "plm": _plm}
    if args.rope_scaling_type in kinds:
        return kinds[args.rope_scaling_type](args)
    raise NotDone(f"Megatron has no such frequencies: {args.rope_scaling_type}; valid: {', '.join(kinds)}")
