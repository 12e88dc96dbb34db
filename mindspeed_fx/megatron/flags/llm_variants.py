"""Models of MindSpeed-LLM that Megatron's flags do not build: sparse attention and DeepSeek-V4."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron.flags.flag import REFUSED, Flag, added, setting, switch

SPARSE = (
    "MindSpeed-LLM's indexer was not compared with Megatron's; use Megatron's "
    "`--experimental-attention-variant dsa` with its --dsa-indexer flags"
)
FOUR = "DeepSeek-V4's layers are not Megatron's; register them with --spec"


def _settings(of: str, *rows: tuple[str, Any, Any]) -> list[Flag]:
    return [setting(name, of, default, kind, llm=True) for name, default, kind in rows]


FLAGS = [
    switch("--enable-dsa-indexer", REFUSED, "sparse attention with an indexer", SPARSE, llm=True),
    *_settings(
        "--enable-dsa-indexer",
        ("--apply-rope-no-in-complex", False, None),
        ("--index-n-heads", 64, int),
        ("--index-head-dim", 128, int),
        ("--index-topk", 2048, int),
        ("--index-topk-freq", 1, int),
        ("--index-topk-pattern", None, str),
        ("--index-skip-topk-offset", 2, int),
        ("--index-share-for-mtp-iteration", False, None),
        ("--indexer-loss-coeff", 1.0, float),
        ("--indexer-qk-quant-scheme", None, str),
        ("--no-use-sparse-c8-indexer", False, None),
        ("--use-fused-lightning-indexer-loss", False, None),
        ("--scale-fmt", None, str),
        ("--max-batch-size", 4, int),
    ),
    switch("--use-sparse-flash-attn", REFUSED, "sparse attention by one kernel", SPARSE, llm=True),
    added("--position-embedding-type", "deepseek4", REFUSED, "DeepSeek-V4's rotation", FOUR, llm=True),
    switch("--kv-compress", REFUSED, "keys and values of DeepSeek-V4 compressed", FOUR, llm=True),
    *_settings(
        "--kv-compress",
        ("--compress-rope-theta", 40000.0, float),
        ("--rope-theta", 10000.0, float),
        ("--rope-factor", 4.0, float),
        ("--original-seq-len", 65536, int),
        ("--sliding-window-size", 128, int),
        ("--o-groups", 8, int),
        ("--o-lora-rank", 1024, int),
    ),
    Flag(
        "--compress-ratios",
        REFUSED,
        "a setting of `--kv-compress`",
        "what becomes of `--kv-compress`; without that flag it has no effect",
        type=int,
        nargs="+",
        of="--kv-compress",
        llm=True,
    ),
    switch("--enable-mhc", REFUSED, "several residual streams", FOUR, llm=True),
    *_settings(
        "--enable-mhc",
        ("--hc-eps", 1e-6, float),
        ("--hc-mult", 4, int),
        ("--hc-sinkhorn-iters", 20, int),
        ("--use-fused-mhc", False, None),
        ("--use-triton-mhc", False, None),
    ),
    Flag("--mtp-spec", REFUSED, "layers of multi-token prediction", FOUR, type=str, nargs="*", llm=True),
]
"""Rows of the table."""
