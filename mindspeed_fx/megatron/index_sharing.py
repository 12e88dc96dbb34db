"""Layers that see what an earlier layer's indexer has chosen (``--index-topk-freq``, ``--index-topk-pattern``).

A layer hands the choice on as the ``context`` that Megatron's blocks pass from layer to layer, with recomputation too,
and that GPT models have no other use for.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import Tensor, nn


class Shared:
    """What goes through a layer in place of its mask.

    Attributes:
        indices: chosen tokens [batch, seq, topk], of an earlier layer until an indexer has chosen.
    """

    def __init__(self, indices: Tensor | None) -> None:
        self.indices = indices


class Sharing:
    """A TransformerLayer's forward that takes and returns the choice."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, context: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shared = Shared(context)
        hidden, _ = super().forward(hidden_states, attention_mask=shared, context=None, **kwargs)  # type: ignore[misc]
        return hidden, shared.indices


def hand_on(layers: nn.ModuleList) -> None:
    """Make Megatron's layers hand on what they have chosen."""
    for layer in layers:
        kind = type(layer)
        layer.__class__ = type(f"Sharing{kind.__name__}", (Sharing, kind), {})


def sources(args: Namespace, layers: int) -> list[int]:
    """Of each layer the one that chooses for it, itself or an earlier one, both counted from one.

    Layer n of ``--index-topk-freq`` f and ``--index-skip-topk-offset`` o takes the choice of n - (max(n - o, 0) mod f);
    in a pattern C (or F) chooses and S takes the last one's.

    Raises:
        ValueError: the pattern is not one of these letters for each layer, or begins with S.
    """
    if args.index_topk_pattern is None:
        frequency, offset = max(args.index_topk_freq, 1), max(args.index_skip_topk_offset, 1)
        return [n - max(n - offset, 0) % frequency for n in range(1, layers + 1)]
    pattern = args.index_topk_pattern.upper()
    if len(pattern) != layers or set(pattern) - set("CFS") or pattern.startswith("S"):
        raise ValueError(
            f"--index-topk-pattern {args.index_topk_pattern}: expected {layers} letters, one a layer, C (chooses) or S "
            "(takes the last choice), the first C"
        )
    result: list[int] = []
    for number, letter in enumerate(pattern, 1):
        result.append(result[-1] if letter == "S" else number)
    return result
