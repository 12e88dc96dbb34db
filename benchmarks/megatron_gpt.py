"""Megatron-core GPT, one training step on CPU: eager, Inductor and mindspeed, interleaved.

    python -m benchmarks.megatron_gpt [--rounds 9] [--case 512|2048|all] [--dtypes float32,bfloat16] [--clock wall]

All three run the model with the mindspeed_fx Megatron adaptor, without which it neither runs nor compiles on CPU. The
loss per token is averaged outside the compiled model, as Megatron's ``loss_func`` does.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import common

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

import mindspeed_fx.megatron_adaptor  # noqa: F401

CASES = {"512": dict(layers=4, seq=512, batch=2, vocab=8192), "2048": dict(layers=2, seq=2048, batch=1, vocab=32768)}


def build(dtype: torch.dtype, layers: int, seq: int, vocab: int, **_: int) -> GPTModel:
    config = TransformerConfig(
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        num_layers=layers,
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=1408,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocab,
        max_sequence_length=seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def make_inputs(seq: int, batch: int, vocab: int, **_: int) -> dict[str, torch.Tensor | None]:
    ids = torch.randint(0, vocab, (batch, seq))
    positions = torch.arange(seq).expand_as(ids)
    return dict(input_ids=ids, position_ids=positions, attention_mask=None, labels=ids.roll(-1, 1))


def run(name: str, dtype: torch.dtype, rounds: int, clock: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = build(dtype, **case).to(dtype)
    inputs = make_inputs(**case)
    steps = common.rivals(model, inputs, lambda loss: loss.mean(), fullgraph=True)
    title = f"Megatron-core GPT, {case}, hidden 512, 8 heads, 4 kv heads, ffn 1408, {dtype}, {clock} time"
    common.race(title, model, steps, rounds, clock)


if __name__ == "__main__":
    options = common.arguments(rounds=9, case="all", dtypes="float32,bfloat16", clock="wall")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    for case in CASES if options.case == "all" else [options.case]:
        for dtype in options.dtypes.split(","):
            run(case, getattr(torch, dtype), options.rounds, options.clock)
    dist.destroy_process_group()
