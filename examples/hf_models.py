"""The models of train_hf.py: an architecture of Hugging Face from its configuration, small where nothing else is said,
and the sum of its losses as one module.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from argparse import Namespace
from typing import Any, Iterator

import torch
import torch.nn.functional as F
from hf_arguments import fail
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto

from mindspeed_fx.errors import nearest

IGNORED = -100
"""A label that has no loss."""
KINDS: dict[str, tuple[Any, Any]] = {
    "vision": (AutoModelForImageClassification, modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "seq2seq": (AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
}
"""Kind -> class that builds, and what architectures it knows; the first kind that knows an architecture is its own."""

SIZES: dict[str, tuple[int, tuple[str, ...]]] = {
    "layers": (4, ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers",
                   "num_decoder_layers")),
    "hidden": (128, ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim",
                     "attention_hidden_size", "lru_width")),
    "heads": (4, ("num_attention_heads", "num_heads", "n_head", "n_heads", "decoder_attention_heads",
                  "encoder_attention_heads")),
    "kv_heads": (2, ("num_key_value_heads",)),
    "head_dim": (32, ("head_dim", "d_kv")),
    "ffn": (256, ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "d_inner", "hidden_dim",
                  "decoder_ffn_dim", "encoder_ffn_dim")),
    "experts": (4, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")),
    "experts_per_token": (2, ("num_experts_per_tok", "moe_k", "moe_top_k")),
    "expert_ffn": (64, ("moe_intermediate_size", "shared_expert_intermediate_size")),
    "window": (64, ("sliding_window", "attention_window_size")),
}  # fmt: skip
"""Argument -> its small size, and the names that configurations have for it."""
LATENT = dict(kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, n_group=1,
              topk_group=1, first_k_dense_replace=1, decoder_sparse_step=1, n_shared_experts=1,
              num_nextn_predict_layers=0, rotary_dim=16)  # fmt: skip
"""Small sizes that have no argument: of latent attention, groups of experts, rotations."""
DROPOUTS = ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout",
            "dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout",
            "seq_classif_dropout", "classifier_dropout", "drop_path_rate", "layerdrop", "encoder_layerdrop",
            "decoder_layerdrop", "summary_last_dropout", "resid_dropout", "embedding_dropout",
            "embd_dropout")  # fmt: skip
OPTIONAL = ("n_inner", "head_dim", "sliding_window", "q_lora_rank", "num_key_value_heads", "classifier_dropout")
"""Left alone where the configuration says None, which means something else than a number."""
OWN: dict[str, dict[str, Any]] = {
    "convnext": dict(num_stages=2, hidden_sizes=[32, 64], depths=[2, 2]),
    "deberta-v2": dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=32),
    "falcon": dict(alibi=False),
    "mamba2": dict(num_heads=8, head_dim=32, n_groups=2, state_size=16, chunk_size=32),
    "resnet": dict(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"),
    "roberta": dict(type_vocab_size=1),
    "swin": dict(patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "t5": dict(num_decoder_layers=None),
}
"""What single architectures need besides small sizes."""


def find_kind(model: str, kind: str | None) -> str:
    """The kind of an architecture; ends the run where there is no such architecture, or none of that kind."""
    kinds = [k for k, (_, names) in KINDS.items() if model in names]
    if not kinds:
        known = sorted({n for _, names in KINDS.values() for n in names})
        some = ", ".join(
            n for n in ("qwen3", "llama", "gpt2", "mixtral", "bert", "roberta", "t5", "bart", "vit", "convnext")
        )
        fail(f"--model {model}{nearest(model, known)}; {len(known)} architectures are known, among them {some}")
    if kind is not None and kind not in kinds:
        fail(f"--kind {kind}: there is no such model of {model}; valid: {', '.join(kinds)}")
    return kind or kinds[0]


def make_config(args: Namespace, vocabulary: Any) -> Any:
    """The configuration: of a file, of pretrained weights, or small; with what the arguments say in its place.

    Args:
        args: of the run; ``model`` and ``kind`` are set where a file or weights tell them.
        vocabulary: the tokens of the text (:mod:`hf_data`).
    """
    if args.from_pretrained:
        with refusals("--from-pretrained"):
            config = _override(args, AutoConfig.from_pretrained(args.from_pretrained))
        args.model, args.kind = config.model_type, find_kind(config.model_type, args.kind)
        return config
    values: dict[str, Any] = {}
    if args.config:
        try:
            values = json.loads(pathlib.Path(args.config).read_text())
            args.model = values.pop("model_type")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            fail(f"--config {args.config}: {error}; a JSON file with model_type is expected")
    args.kind = find_kind(args.model, args.kind)
    if args.model not in CONFIG_MAPPING:
        fail(f"--model {args.model}: transformers has no configuration of that name")
    with refusals(f"--model {args.model}"):
        default = AutoConfig.for_model(args.model)
        if not args.config:
            values = small_sizes(default) | OWN.get(args.model, {})
        values |= {k: v for k, v in tokens_of(args, vocabulary).items() if has(default, k) or k == "num_labels"}
        return _override(args, AutoConfig.for_model(args.model, **values))


def small_sizes(default: Any) -> dict[str, Any]:
    """Sizes that make seconds of an architecture, by the names that its configuration has for them."""
    small = {name: size for size, names in SIZES.values() for name in names} | LATENT
    small = {
        k: v for k, v in small.items() if has(default, k) and not isinstance(getattr(type(default), k, None), property)
    }
    small = {k: v for k, v in small.items() if not (k in OPTIONAL and getattr(default, k) is None)}
    if "qk_rope_head_dim" in small:  # latent attention: no heads are shared, and a head's size is what is rotated
        small |= {k: v for k, v in dict(head_dim=16, num_key_value_heads=4).items() if k in small}
    for k in [k for k, v in small.items() if isinstance(getattr(default, k), (list, tuple))]:
        del small[k]  # one for each stage of a model of images
    return small


def tokens_of(args: Namespace, vocabulary: Any) -> dict[str, Any]:
    """What the data asks of a configuration."""
    if args.kind == "vision":
        return dict(image_size=args.image_size, num_labels=10, num_channels=1, patch_size=4)
    length = args.seq_length + 8  # some count positions from behind the padding's number
    special = dict(pad_token_id=vocabulary.pad, bos_token_id=vocabulary.bos, eos_token_id=vocabulary.eos)
    special |= dict(decoder_start_token_id=vocabulary.bos, forced_eos_token_id=None, sep_token_id=vocabulary.eos)
    positions = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length"), length)
    return dict(vocab_size=vocabulary.size, use_cache=True, use_mamba_kernels=False, **special, **positions)


def first_of_decoder(config: Any, vocabulary: Any) -> int:
    """The token before the first of a target."""
    start = getattr(config, "decoder_start_token_id", None)
    return vocabulary.bos if start is None else start


def _override(args: Namespace, config: Any) -> Any:
    """What the command line says in place of the configuration's."""
    for name, (_, names) in SIZES.items():
        if (value := getattr(args, name)) is None:
            continue
        known = [n for n in names if has(config, n)]
        if not known:
            fail(f"--{name.replace('_', '-')} {value}: the configuration of {config.model_type} has no such size")
        for n in known:
            setattr(config, n, value)
    for text in args.set or ():
        name, equals, value = text.partition("=")
        known = sorted(config.to_dict())
        if not equals or not has(config, name):
            fail(f"--set {text}{nearest(name, known)}; NAME=JSON is expected, with a name of the configuration")
        try:
            setattr(config, name, json.loads(value))
        except ValueError:
            setattr(config, name, value)
    if args.dropout is not None:
        for name in (n for n in DROPOUTS if has(config, n) and getattr(config, n) is not None):
            setattr(config, name, args.dropout)
    if (layers := getattr(config, "layer_types", None)) and len(layers) != config.num_hidden_layers:
        config.layer_types = [layers[i % len(layers)] for i in range(config.num_hidden_layers)]
    return config


def has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001  an attribute that differs by layer and is asked of all
        return False


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """What transformers refuses ends the run in its words, in one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever a configuration finds wrong
        fail(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def build_model(args: Namespace, config: Any) -> nn.Module:
    """The model on this rank's host, in the precision of the main weights; equal on all ranks."""
    kind, dtype = KINDS[args.kind][0], torch.float64 if args.dtype == "float64" else torch.float32
    torch.manual_seed(args.seed)
    with refusals(f"--from-pretrained {args.from_pretrained}" if args.from_pretrained else f"--model {args.model}"):
        if args.from_pretrained:
            return kind.from_pretrained(args.from_pretrained, config=config, dtype=dtype)
        return kind.from_config(config, dtype=dtype)


class Losses(nn.Module):
    """The sum of a model's losses over all labels, a tensor of one element; the loop divides it by their number.
    Without labels, its logits.

    Subclasses name their inputs; tokens and labels are integers [batch, sequence].
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def sum(self, output: Any, labels: Tensor | None) -> Tensor:
        """Cross-entropy where there is a label, in float32 at least, and the model's own loss of its router."""
        if labels is None:
            return output.logits
        logits = output.logits.flatten(0, -2)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        balance = getattr(output, "aux_loss", None)
        if balance is not None:
            losses = losses + self.model.config.router_aux_loss_coef * balance * (labels != IGNORED).sum()
        return losses


class CausalLosses(Losses):
    """Labels are the next tokens; positions begin anew in each document, where documents are packed."""

    def forward(self, input_ids: Tensor, labels: Tensor | None, position_ids: Tensor | None = None) -> Tensor:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        return self.sum(self.model(input_ids=input_ids, use_cache=False, **positions), labels)


class MaskedLosses(Losses):
    """Labels are the tokens that were masked."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.sum(self.model(input_ids=input_ids, attention_mask=attention_mask), labels)


class SequenceLosses(Losses):
    """Of encoder and decoder: labels are the target, ``decoder_input_ids`` the same a place later."""

    def forward(
        self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor | None, attention_mask: Tensor | None = None
    ) -> Tensor:
        inputs = {"decoder_input_ids": decoder_input_ids, "attention_mask": attention_mask, "use_cache": False}
        return self.sum(self.model(input_ids=input_ids, **inputs), labels)


class ImageLosses(Losses):
    """Labels [batch] are classes of images [batch, channels, height, width]."""

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return self.sum(self.model(pixel_values=pixel_values), labels)


LOSSES = {"causal": CausalLosses, "masked": MaskedLosses, "seq2seq": SequenceLosses, "vision": ImageLosses}


@torch.no_grad()
def sees_other_documents(losses: CausalLosses, vocabulary: int) -> str | None:
    """Why packed documents are not apart in this model: tried, with two documents of four tokens in eight; None where
    the second gives the same logits whatever stands in the first.
    """
    first, positions = torch.arange(8)[None] % vocabulary, torch.arange(8)[None] % 4
    second = torch.cat(((first[:, :4] + 3) % vocabulary, first[:, 4:]), 1)
    training, device = losses.training, next(losses.parameters()).device
    losses.eval()
    try:
        results = [
            losses.model(input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False).logits[:, 4:]
            for ids in (first, second)
        ]
    except TypeError:
        return "it takes no positions"
    finally:
        losses.train(training)
    return None if torch.allclose(*results, rtol=1e-5, atol=1e-6) else "it looks back over the beginning of a document"
