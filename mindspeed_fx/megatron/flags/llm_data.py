"""Data, tokenizers and weights of MindSpeed-LLM, and its tasks besides pretraining."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import MEGATRON, OWN, REFUSED, Flag, NotDone, added, get, switch, word

CONVERT = "MindSpeed-LLM converts weights; convert them before the run"
DATA = "MindSpeed-LLM prepares data; --data-path takes Megatron's .bin and .idx"
TUNING = "fine-tuning is MindSpeed-LLM's; pretraining alone is done here"
OTHER = "evaluation and generation are MindSpeed-LLM's; pretraining alone is done here"


def _hugging_face(args: Namespace) -> str:
    """MindSpeed's tokenizer from a directory of Hugging Face's is Megatron's HuggingFaceTokenizer."""
    path = get(args, "tokenizer_name_or_path") or get(args, "tokenizer_model")
    if not path:
        raise NotDone("give --tokenizer-name-or-path")
    args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", path
    args.tokenizer_hf_use_fast = get(args, "tokenizer_not_use_fast", True)
    return f"tokenizer_type = HuggingFaceTokenizer, tokenizer_model = {path}"


def _path(args: Namespace) -> str:
    if get(args, "tokenizer_type") in ("PretrainedFromHF", "HuggingFaceTokenizer"):
        return "tokenizer_model of Megatron's HuggingFaceTokenizer"
    return f"tokenizer type {get(args, 'tokenizer_type')} does not read it, as in MindSpeed"


def _stated(text: str) -> Any:
    return lambda args: f"MindSpeed-LLM's own, not done here: {text}"


def own(text: str, asks: str, *rows: tuple) -> list[Flag]:
    """Accepted flags of what MindSpeed-LLM does itself: (name, default, type, nargs); without a default a switch."""
    return [_row(OWN, text, asks, row, act=_stated(text)) for row in rows]


def refused(text: str, asks: str, *rows: tuple) -> list[Flag]:
    """Refused flags of other tasks."""
    return [_row(REFUSED, text, asks, row) for row in rows]


def _row(state: str, text: str, asks: str, row: tuple, **more: Any) -> Flag:
    name, default, kind, nargs = (*row, *(False, None, None)[len(row) - 1 :])
    if default is False:
        return switch(name, state, asks, text, llm=True, **more)
    return Flag(name, state, asks, text, type=kind or type(default), default=default, nargs=nargs, llm=True, **more)


FLAGS = [
    added(
        "--tokenizer-type",
        "PretrainedFromHF",
        MEGATRON,
        "a tokenizer from a directory of Hugging Face's",
        "`--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR`",
        act=_hugging_face,
    ),
    added(
        "--tokenizer-type",
        "MagistralTokenizer",
        REFUSED,
        "Magistral's tokenizer",
        "use `--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR`",
        llm=True,
    ),
    word(
        "--tokenizer-name-or-path",
        None,
        MEGATRON,
        "that directory",
        "`--tokenizer-model`",
        act=_path,
    ),
    Flag(
        "--tokenizer-not-use-fast",
        MEGATRON,
        "the tokenizer in Python instead of Rust",
        "no `--tokenizer-hf-use-fast`",
        action="store_false",
        default=True,
        act=_path,
    ),
    *own(
        CONVERT,
        "weights from and to Hugging Face's form",
        ("--enable-hf2mg-convert",),
        ("--enable-mg2hf-convert",),
        ("--only-convert-last-checkpoint",),
        ("--save-layer-by-layer",),
        ("--save-lora-to-hf",),
        ("--model-type-hf", None, str),
        ("--hf-cfg-dir", None, str),
        ("--hf-save-dir", None, str),
        ("--mg-save-dir", None, str),
    ),
    *own(
        DATA,
        "how its data are prepared",
        ("--handler-name", "", str),
        ("--dataset-impl", "mmap", str),
        ("--datasets", None, str, "+"),
        ("--dataset-dir", None, str),
        ("--cache-dir", "~/tmp", str),
        ("--overwrite-cache",),
        ("--hf-datasets-params", None, str),
        ("--script-data-dir", None, str),
        ("--json-keys", None, str, "+"),
        ("--map-keys", None, json.loads),
        ("--merge-group-keys", None, str, "+"),
        ("--output-prefix", None, str),
        ("--append-eod",),
        ("--keep-newlines",),
        ("--split-sentences",),
        ("--n-subs", 1),
        ("--workers", 1),
        ("--streaming",),
        ("--max-samples", None, int),
        ("--mix-strategy", "concat", str),
        ("--interleave-probs", None, str),
        ("--pad-vocab-size-to", None, int),
        ("--tokenizer-padding-side", "right", str),
        ("--enable-share-memory",),
    ),
    *own(
        "every machine then builds the index files of its data; Megatron builds them once, on shared storage",
        "machines share no storage",
        ("--no-shared-storage",),
    ),
    word(
        "--stage",
        None,
        REFUSED,
        "which kind of training",
        TUNING,
        choices=("sft", "dpo", "ray_ppo", "ray_online_dpo", "ray_grpo"),
        llm=True,
    ),
    *refused(
        TUNING,
        "data for fine-tuning",
        ("--is-instruction-dataset",),
        ("--is-pairwise-dataset",),
        ("--full-shuffle-instruction-dataset",),
        ("--no-shuffle",),
        ("--pack",),
        ("--neat-pack",),
        ("--padded-samples",),
        ("--pad-to-multiple-of", 8),
        ("--no-pad-to-seq-lengths",),
        ("--cut-max-seqlen",),
        ("--no-cut-token",),
        ("--dataset-additional-keys", None, str, "*"),
        ("--prompt-type", None, str),
        ("--prompt-type-path", None, str),
        ("--enable-thinking", None, str),
        ("--drop-thinking", None, str),
        ("--reasoning-effort", None, str),
        ("--reward-tokens", None, str, "+"),
        ("--load-checkpoint-loosely",),
    ),
    *refused(
        TUNING,
        "low-rank adapters",
        ("--lora-target-modules", None, str, "+"),
        ("--lora-load", None, str),
        ("--lora-r", 16),
        ("--lora-alpha", 32),
        ("--lora-modules-to-save", None, str, "+"),
        ("--lora-register-forward-hook", None, str, "+"),
        ("--lora-fusion",),
        ("--lora-ckpt-filter",),
        ("--lu-lora-final-layer-index", None, int),
        ("--lu-lora-lr", 1.25e-06),
        ("--lu-lora-lr-ratio", 1.0),
    ),
    *refused(
        TUNING,
        "learning from preferences",
        ("--dpo-beta", 0.1),
        ("--dpo-label-smoothing", 0.0),
        ("--dpo-loss-type", "sigmoid", str),
        ("--pref-ftx", 0.0),
        ("--ref-model", None, str),
        ("--refer-model-iter", 1),
        ("--use-wandb",),
    ),
    *refused(
        OTHER,
        "evaluation and generation",
        ("--task", None, str, "*"),
        ("--task-data-path", None, str, "*"),
        ("--use-kv-cache",),
    ),
    *own(
        "its scripts of evaluation and generation read it, pretraining does not",
        "evaluation and generation",
        ("--evaluation-batch-size", 1),
        ("--eval-language", "en", str),
        ("--max-eval-samples", None, int),
        ("--instruction-template", "", str),
        ("--alternative-prompt",),
        ("--origin-postprocess",),
        ("--chain-of-thought",),
        ("--no-chat-template",),
        ("--hf-chat-template",),
        ("--add-eos-token", None, str, "+"),
        ("--broadcast",),
        ("--greedy",),
        ("--history-turns", 3),
        ("--max-length", 256),
        ("--max-new-tokens", 128),
        ("--temperature", 0.7),
        ("--top-k", 50),
        ("--top-p", 0.95),
    ),
]
"""Rows of the table."""
