"""Frequencies of rotations that Megatron-core's plain attention has not, as MindSpeed-LLM has them: LongRoPE (Ding et
al. 2024, arXiv 2402.13753) and YaRN (Peng et al. 2023, arXiv 2309.00071).
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import patches

FACTOR = "models.common.embeddings.yarn_rotary_pos_embedding:_yarn_get_concentration_factor_from_config"


def set_frequencies(model: Any, args: Namespace) -> None:
    """Give the rotation of a GPTModel the frequencies of ``--rope-scaling-type``, and its cosines their factor."""
    scaled = {"longrope": longrope, "yarn": yarn}[args.scaled_rotation]
    model.rotary_pos_emb.inv_freq, model.config.rotation_factor = scaled(model.rotary_pos_emb.inv_freq, args)


def factor_of(config: Any) -> float:
    """What cosines and sines are multiplied by."""
    own = getattr(config, "rotation_factor", None)
    return patches.original(FACTOR)(config) if own is None else own


def longrope(frequencies: Tensor, args: Namespace) -> tuple[Tensor, float]:
    """(frequencies by their own factors, factor of cosines and sines): f_i / l_i where sequences are longer than the
    original length L, else f_i / s_i; sqrt(1 + ln(max / L) / ln L), or the factor given.

    Args:
        frequencies: [rotated width / 2].

    Raises:
        ValueError: not one factor for each frequency.
    """
    length = args.rope_scaling_original_max_position_embeddings
    name = "long" if args.seq_length > length else "short"
    words = getattr(args, f"{name}_factor").split(",")
    if len(words) != len(frequencies):
        raise ValueError(
            f"--{name}-factor has {len(words)} numbers; the rotation has {len(frequencies)} frequencies, one for each"
        )
    divisors = torch.tensor([float(w) for w in words], dtype=frequencies.dtype, device=frequencies.device)
    ratio = args.max_position_embeddings / length
    factor = getattr(args, f"{name}_mscale") or (math.sqrt(1 + math.log(ratio) / math.log(length)) if ratio > 1 else 1)
    return frequencies / divisors, factor


def yarn(frequencies: Tensor, args: Namespace) -> tuple[Tensor, float]:
    """(frequencies between their own and those of a longer context, factor of cosines and sines).

    Args:
        frequencies: [rotated width / 2].
    """
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as megatron_yarn

    length, half = args.rope_scaling_original_max_position_embeddings, len(frequencies)
    ratio = args.max_position_embeddings / length
    low, high = megatron_yarn._yarn_find_correction_range(
        args.beta_fast, args.beta_slow, 2 * half, args.rotary_base, length
    )
    slow = megatron_yarn._yarn_linear_ramp_mask(low, high, half, frequencies.device)
    factor, whole = (
        megatron_yarn._yarn_get_mscale(ratio, a) for a in (args.rope_scaling_mscale, args.rope_scaling_mscale_all_dim)
    )
    return frequencies / ratio * slow + frequencies * (1 - slow), factor / whole
