"""Flags that MindSpeed registers and Megatron 0.16 has itself: its parser takes them, and nothing is left to do."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron.flags.flag import MEGATRON, Flag
from mindspeed_fx.megatron.fp8_linears import VALID

EIGHT = f"without TransformerEngine linears of layers (mindspeed::linear_fp8) with {VALID}; others are refused by name"


def _shared(name: str, asks: str, kind: Any = None, does: str = "Megatron's own flag", **more: Any) -> Flag:
    action = {"action": "store_true", "default": False} if kind is None else {"type": kind}
    return Flag(name, MEGATRON, asks, does, requested=lambda args: False, **{**action, **more})


FLAGS = [
    _shared("--add-qkv-bias", "a bias in the projections of queries, keys and values"),
    _shared("--q-lora-rank", "latent attention: rank of the queries", int),
    _shared("--kv-lora-rank", "latent attention: rank of keys and values", int),
    _shared("--v-head-dim", "latent attention: width of a head's values", int),
    _shared("--linear-key-head-dim", "delta rule: width of a head's keys", int, llm=True),
    _shared("--linear-value-head-dim", "delta rule: width of a head's values", int, llm=True),
    _shared("--linear-num-key-heads", "delta rule: heads of keys", int, llm=True),
    _shared("--linear-num-value-heads", "delta rule: heads of values", int, llm=True),
    _shared("--padded-vocab-size", "size of the vocabulary with padding", int, llm=True),
    _shared("--experimental-attention-variant", "dsa: sparse attention", str),
    _shared("--fp8-format", "products in 8 bits", str, EIGHT, dest="fp8"),
    _shared("--fp8-recipe", "how products in 8 bits are scaled", str, EIGHT, default="delayed"),
    _shared("--moe-router-dtype", "type of the router's product", str),
    _shared("--position-embedding-type", "how positions are told", str, default="learned_absolute"),
    _shared("--tokenizer-type", "which tokenizer", str),
    _shared("--pipeline-model-parallel-layout", "which layers a stage holds", str),
    _shared("--apply-wd-to-qk-layernorm", "Muon: weight decay of norms of queries and keys"),
    _shared("--muon-extra-scale-factor", "Muon: scale of the step", float, default=1.0),
    _shared("--muon-fp32-matmul-prec", "Muon: precision of its products", str, default="medium"),
    _shared("--muon-momentum", "Muon: momentum", float, default=0.9),
    _shared(
        "--muon-no-split-qkv",
        "Muon: queries, keys and values as one",
        action="store_false",
        default=True,
        dest="muon_split_qkv",
    ),
    _shared("--muon-num-ns-steps", "Muon: steps of its iteration", int, default=5),
    _shared("--muon-scale-mode", "Muon: how its step is scaled", str, default="spectral"),
    _shared("--muon-tp-mode", "Muon: divided weights", str, default="blockwise"),
]
"""Rows of the table."""
