"""The chunks of launch scripts on fake ``npu:0`` tensors, through torch_npu, in a process that has it
(tests/ascend/npu_process.py).

    python npu_trace.py [--first] SCRIPT ...

Each model is built from the script's small arguments as Megatron's pretrain_gpt.py builds it, for the first rank and,
without ``--first``, for the last, with the groups of the whole run on torch's "fake" backend; forward and backward are
compiled. Prints one JSON object: script -> a row for each chunk.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections import Counter
from typing import Any, Iterator
from unittest import mock

import torch

WAITS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default")
"""Operators for which the host waits for the device."""
FLAGS = ("--fake-process-group", "--disable-gloo-process-groups", "--no-initialization")


def main(*names: str) -> None:
    """Print what became of the chunks of the scripts' first and last ranks."""
    import torch_npu  # noqa: F401

    from tests.megatron.launch import runner, shrink, table

    runner.prepare()
    is_first_alone = "--first" in names
    scripts = {s.name: s for collection in shrink.COLLECTIONS for s in shrink.scripts(collection)}
    answers = {}
    for name in (n for n in names if n != "--first"):
        args, world = shrink.shrink(scripts[name])
        args = [*table.with_skips(args, table.refusals(args)[0]), *FLAGS]
        answers[name] = [
            row for rank in sorted({0, 0 if is_first_alone else world - 1}) for row in _forked(rank, world, args)
        ]
    print(json.dumps(answers))


def _forked(rank: int, world: int, args: list[str]) -> list[dict[str, Any]]:
    """The rows of one rank, made in a process of its own: Megatron's groups and arguments are global."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        try:
            rows = _rows(rank, world, args)
        except BaseException:
            traceback.print_exc()
            rows = [{"error": traceback.format_exc(limit=-4)}]
        with os.fdopen(write, "w") as pipe:
            json.dump(rows, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        rows = json.load(pipe)
    os.waitpid(child, 0)
    return rows


def _rows(rank: int, world: int, args: list[str]) -> list[dict[str, Any]]:
    from megatron.core import mpu
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.training import get_args
    from megatron.training.initialize import initialize_megatron

    from mindspeed_fx.compat import tracing
    from mindspeed_fx.megatron import flags

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.argv[1:] = args
    with mock.patch("torch.cuda.current_device", lambda: "cpu"):  # what it makes is a scale of the losses
        initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    args = get_args()
    options = flags.backend_options(args)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    rows, mode = [], tracing.new_fake_mode(unknown_sizes=True)
    for stage in range(args.virtual_pipeline_model_parallel_size or 1):
        ends = {"vp_stage": stage, "ignore_virtual": False} if args.virtual_pipeline_model_parallel_size else {}
        first, last = mpu.is_pipeline_first_stage(**ends), mpu.is_pipeline_last_stage(**ends)
        with mode, torch.device("npu:0"), _default_dtype(args.params_dtype):
            chunk, inputs = _chunk(args, first, last, stage if ends else None)
        rows.append({"rank": rank, "stage": stage, **_trace(chunk, inputs, options, mode)})
    return rows


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Weights are made in the type to which Megatron's Float16Module converts them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _chunk(args: Any, first: bool, last: bool, stage: int | None) -> tuple[Any, dict[str, Any]]:
    """A chunk of the model, and the arguments of its forward, as pretrain_gpt.py gives them."""
    from gpt_builders import gpt_builder
    from model_provider import model_provider

    from mindspeed_fx.megatron import documents, logged_losses
    from mindspeed_fx.megatron.training import document_ends

    chunk = model_provider(gpt_builder, pre_process=first, post_process=last, vp_stage=stage)
    logged_losses.prepare(chunk.config)
    batch, length = args.micro_batch_size, args.seq_length // args.context_parallel_size
    tokens = torch.zeros(batch, length, dtype=torch.long)
    inputs = {"input_ids": tokens, "position_ids": tokens.clone(), "attention_mask": None}
    if args.create_attention_mask_in_dataloader:
        inputs["attention_mask"] = torch.zeros(batch, 1, length, args.seq_length, dtype=torch.bool)
        if document_ends.are_skipped(args):
            ends = documents.count_of_ends(batch, args.seq_length)
            inputs["attention_mask"] = torch.zeros(batch, ends, dtype=torch.int64)
    if last:
        inputs["labels"] = tokens.clone()
    if not first:
        rows = length // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        chunk.set_input_tensor(torch.zeros(rows, batch, args.hidden_size, dtype=args.params_dtype, requires_grad=True))
    for parameter in chunk.parameters():  # as Megatron's DistributedDataParallel gives them
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
    return chunk, inputs


def _trace(model: Any, inputs: dict[str, Any], options: dict[str, Any], mode: Any) -> dict[str, Any]:
    from mindspeed_fx.ascend.npu_graphs import trace_on_npu
    from mindspeed_fx.options import Options

    traced = trace_on_npu(model, (), inputs, Options.parse({**options, "codegen": "eager"}, environ={}), mode=mode)
    operators = Counter(str(n.target) for _, _, gm in traced.sides for n in gm.graph.nodes if n.op == "call_function")
    counts: Counter[str] = Counter()
    for record in traced.records:
        counts.update({k: v for k, v in record.counts.items() if v and k.startswith("fusion.")})
    return {
        "graphs": len(traced.records),
        "breaks": traced.breaks,
        "fused": dict(counts),
        "unlowered": [
            f"{row['operator']}: {row['reason']}"
            for r in traced.records
            for row in r.lowered
            if row["kernel"].startswith(("reference", "its own"))
        ],
        "npu": {k: n for k, n in operators.items() if k.startswith("npu.")},
        "collectives": {k: n for k, n in operators.items() if "c10d" in k and "wait_tensor" not in k},
        "waits": {k: operators[k] for k in WAITS if operators[k]},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
