"""Stages of a pipeline in train_hf.py: a step of one of torch's schedules, the norm of all stages, evaluation, a
sample.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from hf_arguments import fail
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

import mindspeed_fx
from mindspeed_fx.errors import OptionError

Batch = dict[str, torch.Tensor]


class Pipeline:
    """This rank's stages of a model and the schedule that runs them.

    Args:
        args: of the run.
        losses: the model on this rank's host; a weight of another rank's stages is free once its caller lets it go.
        plan: with "pp" in its mesh; its schedule, else 1F1B.
        sizes: of the mesh.
        batch: a global one.
        microbatches: of a step.
        casts: what products are computed in.

    Attributes: ``module``: the stages' parameters and buffers, under the model's names.
    """

    def __init__(
        self,
        args: Namespace,
        losses: nn.Module,
        plan: Any,
        sizes: dict[str, int],
        batch: Batch,
        microbatches: int,
        device: torch.device,
        casts: Any = contextlib.nullcontext,
    ):
        self.model, self.microbatches, self.casts, self.labels = losses.to(device), microbatches, casts, 1
        mesh = init_device_mesh(args.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        name, _, numbers = (args.schedule or plan.schedule or "1F1B:1").partition(":")
        try:
            kind = get_schedule_class(name)
            one = issubclass(kind, PipelineScheduleSingle)
            style = "v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"
            virtual = 1 if one else int(numbers.partition(":")[0] or 2)
            how = {"style": style, "virtual": virtual, "microbatches": microbatches, "options": args.options or None}
            batch = {n: t.to(device) for n, t in batch.items()}
            with casts():
                self.stages = mindspeed_fx.pipeline_stages(losses, mesh, plan, (), batch, **how)
            schedule = kind(
                self.stages[0] if one else self.stages,
                microbatches,
                loss_fn=lambda losses, _: losses.sum() / self.labels,
                scale_grads=False,
            )
        except (OptionError, ValueError) as error:
            fail(f"--plan {args.plan}: {error}")
        self.schedule = mindspeed_fx.follow_shapes(schedule)
        self.name, self.module = f"{name}:{virtual}", self.stages.module
        self.group, self.rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.last = self.stages[0].stage_index_to_group_rank[self.stages[0].num_stages - 1]
        self.own = list(self._parameters_once())

    def _parameters_once(self) -> Any:
        """This rank's parameters, without those that an earlier rank has too."""
        ranks = self.stages[0].stage_index_to_group_rank
        tied = {n: readers for stage in self.stages for n, readers in stage.submod.tied.items()}
        for name, p in self.module.named_parameters():
            if min((ranks[s] for s in tied.get(name, ())), default=self.rank) == self.rank:
                yield p

    def train(self, mode: bool) -> None:
        for stage in self.stages:
            stage.submod.train(mode)

    def step(self, batch: Batch, labels: int) -> float:
        """Forward and backward of a global batch; the mean loss over ``labels``, the same on all ranks."""
        return self._run(self.schedule.step, batch, labels)

    def evaluate(self, batch: Batch) -> float:
        """The sum of the losses of a global batch, which leaves gradients alone."""
        return self._run(self.schedule.eval, batch, 1)

    def _run(self, run: Any, batch: Batch, labels: int) -> float:
        self.labels, losses = labels, []
        with self.casts():
            run(**batch, target=batch["labels"], losses=losses, return_outputs=False)
        total = torch.tensor(sum(float(x) for x in losses), dtype=torch.float64)
        return float(self._from_last(total))

    def _from_last(self, value: torch.Tensor) -> torch.Tensor:
        device = next((p.device for p in self.own), torch.device("cpu"))
        value = value.to(device)
        dist.broadcast(value, src=dist.get_global_rank(self.group, self.last), group=self.group)
        return value

    def clip(self, most: float) -> float:
        """The norm of the gradients of all stages, a weight of several stages once; they are scaled to ``most``."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.own if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square = norm.double().square()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt().to(norm.dtype)
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), most, norm)
        return float(norm)

    def sample(self, kind: str, batch: Batch, vocabulary: Any, length: int) -> str:
        """Text that the model goes on with after the beginning of a held-out row (causal), or makes of one with masks;
        every rank calls it.
        """
        rows = batch["input_ids"].shape[0]  # as many as a step has: microbatches and ranks share them
        ids = batch["input_ids"][:1].expand(rows, -1)
        start, kwargs = ids[:, : min(32, length)], {"labels": None}
        name = "input_ids"
        if kind == "seq2seq":
            ids = ids[:, :length].contiguous()
            start, name = ids.new_full((rows, 1), vocabulary.start), "decoder_input_ids"
            kwargs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        elif "position_ids" in batch:
            total = start.shape[1] + length
            kwargs["position_ids"] = torch.arange(total, device=ids.device)[None].expand(rows, -1).contiguous()
        self.train(False)
        with self.casts():
            tokens = mindspeed_fx.generate(self.schedule, start.contiguous(), length, name=name, **kwargs)
        self.train(True)
        new = tokens[0, start.shape[1] :].tolist()
        new = new[: new.index(vocabulary.eos)] if vocabulary.eos in new else new
        first = ids[0].tolist() if kind == "seq2seq" else start[0].tolist()
        return f"sample: {vocabulary.decode(first)!r} -> {vocabulary.decode(new)!r}"
