"""DeepSeek-V4, which Megatron's flags do not build."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron.flags.flag import REFUSED, Flag, added, setting, switch

FOUR = "DeepSeek-V4's layers are not Megatron's; register them with --spec"


def _settings(of: str, *rows: tuple[str, Any, Any]) -> list[Flag]:
    return [setting(name, of, default, kind, llm=True) for name, default, kind in rows]


FLAGS = [
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
