"""Documents packed into one row of a Megatron-core GPT (``--reset-attention-mask``): a training step on CPU with the
dataset's mask, eager, Inductor and mindspeed, and of mindspeed with where documents end, interleaved.

    python -m benchmarks.megatron_documents [--rounds 7] [--tokens 4096] [--document 512] [--dtypes float32,bfloat16]
        [--clock wall]
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks import common, megatron_gpt
from mindspeed_fx.megatron import documents
from mindspeed_fx.megatron.training.fixed_documents import mask_of_documents

SHAPE = dict(layers=2, batch=1, vocab=8192)


def run(dtype: torch.dtype, options) -> None:
    torch.manual_seed(0)
    shape = SHAPE | dict(seq=options.tokens)
    model = megatron_gpt.build(dtype, **shape).to(dtype)
    mask = mask_of_documents(options.tokens, options.document)[None]
    inputs = megatron_gpt.make_inputs(**shape) | dict(attention_mask=mask)
    steps = common.rivals(model, inputs, lambda loss: loss.mean(), fullgraph=True)
    ends = inputs | dict(attention_mask=documents.document_ends(mask))
    skipping = common.rivals(model, ends, lambda loss: loss.mean(), fullgraph=True)
    steps["mindspeed, ends"] = skipping["mindspeed"]
    title = f"documents of {options.document} in {options.tokens} tokens, {dtype}, {options.clock} time"
    common.race(title, model, steps, options.rounds, options.clock)


if __name__ == "__main__":
    options = common.arguments(rounds=7, tokens=4096, document=512, dtypes="float32,bfloat16", clock="wall")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    for dtype in options.dtypes.split(","):
        run(getattr(torch, dtype), options)
    dist.destroy_process_group()
