"""How the flags of DeepSpeed's experts divide a layer into pieces (:mod:`mindspeed_fx.megatron.pipe_experts`)."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """How a layer is divided.

    Args:
        parts: of the sequence, each with a capacity of its own.
        by_expert: an expert is a piece of its own, not all experts of a rank together.
        slices: of the capacity of a part.
        alternates: exchanges and gathers take turns.
    """

    parts: int = 1
    by_expert: bool = False
    slices: int = 1
    alternates: bool = False


def pieces_of(args: Namespace) -> Pieces | None:
    """What the flags of a run ask for; None: nothing, or rows are known at run time."""
    parts, slices = args.ampipe_degree, args.pipe_experts_multi_data
    if args.moe_no_drop or not args.use_pipe_experts and parts == 1:
        return None
    in_turn = args.pipe_experts_multi_stream and args.use_pipe_experts
    if not has_effect(args):
        return Pieces(parts, args.ampipe_tp_sp_comm_overlap, 1, False)
    return Pieces(parts, True, slices // parts, in_turn)


def has_effect(args: Namespace) -> bool:
    """Whether ``--use-pipe-experts`` has: beside Ampipe the number of slices is a multiple of that of parts, and larger
    where exchanges and gathers do not take turns (MindSpeed's rule).
    """
    parts, slices = args.ampipe_degree, args.pipe_experts_multi_data
    if not args.use_pipe_experts or parts == 1:
        return bool(args.use_pipe_experts)
    return slices % parts == 0 and (slices > parts or bool(args.pipe_experts_multi_stream))
