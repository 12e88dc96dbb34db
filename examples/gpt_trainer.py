"""The training loop of pretrain_gpt.py: Megatron-core's schedules, data parallelism, optimizer and data."""

from __future__ import annotations

import mindspeed_fx.megatron_adaptor  # noqa: F401  isort: skip  before Megatron-core

import contextlib
import functools
import json
import pathlib
import time
from argparse import Namespace
from typing import Callable, Iterator

import gpt_arguments
import gpt_checkpoint
import gpt_model
import gpt_report
import torch
import torch.distributed as dist
from corpus import VOCABULARY, Batches, Corpus
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank


def open_corpus(args: Namespace) -> Corpus:
    """The text, made into token files by rank 0."""

    def make() -> Corpus:
        try:
            corpus = Corpus(args.data, str(pathlib.Path(args.save).parent / "tokens"))
            corpus.require(args.seq_length)
        except (OSError, ValueError) as error:
            gpt_arguments.fail(f"--data: {error}")
        return corpus

    try:
        if args.rank == 0:
            return make()
    finally:
        dist.barrier()
    return make()


def forward_step(batches: Iterator[dict[str, torch.Tensor]], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """One micro-batch through one chunk, as Megatron's schedules call it."""
    batch = {name: tensor.to(torch.cuda.current_device()) for name, tensor in next(batches).items()}
    batch = get_batch_on_this_cp_rank(batch)
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(sum_losses, batch["loss_mask"])


def sum_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Of a micro-batch the sum of losses, the tokens that count, and both for the log."""
    loss, tokens = (losses.float() * mask).sum(), mask.sum()
    return loss, tokens.to(torch.int), {"loss": torch.stack((loss.detach(), tokens))}


def mean_loss(losses: list[dict[str, torch.Tensor]]) -> float:
    """The mean over tokens of all micro-batches and ranks, on every rank."""
    device = torch.cuda.current_device()
    total = torch.stack([entry["loss"] for entry in losses]).sum(0).double() if losses else None
    total = torch.zeros(2, dtype=torch.float64, device=device) if total is None else total
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
    return (total[0] / total[1]).item()


class Trainer:
    """The model with its optimizer, schedule and data, as far as it has come.

    Attributes: ``step``: iterations that are done; ``log``: a row for each.
    """

    def __init__(self, args: Namespace, corpus: Corpus):
        self.args, self.corpus = args, corpus
        with gpt_model.refusals():
            self.config = gpt_model.build_config(args)
            self.model = gpt_model.build_model(args, self.config)
            self.optimizer, self.scheduler = gpt_model.build_optimizer(args, self.model)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        self.run_schedule = get_forward_backward_func()
        self.step, self.log = 0, []
        if args.load:
            gpt_checkpoint.load(self)
        samples = args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size
        self.training, self.validation = corpus.datasets(args.seq_length, samples, args.seed)
        self.batches = self.iterate(self.training, self.step * args.global_batch_size)

    def iterate(self, dataset: torch.utils.data.Dataset, first: int) -> list[Iterator] | Iterator:
        """This rank's micro-batches from sample ``first`` on, for each chunk of the model."""
        rank, ranks = parallel_state.get_data_parallel_rank(), self.args.data_parallel_size
        batches = Batches(len(dataset), first, self.args.micro_batch_size, rank, ranks)
        iterators = [
            iter(torch.utils.data.DataLoader(dataset, batch_sampler=batches, generator=torch.Generator()))
            for _ in self.model
        ]
        return iterators if len(iterators) > 1 else iterators[0]

    def run_microbatches(self, batches: list[Iterator] | Iterator, forward_only: bool) -> float:
        """A global batch through the pipeline's schedule; returns the mean loss."""
        losses = self.run_schedule(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=self.model,
            num_microbatches=get_num_microbatches(),
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        return mean_loss(losses)

    def train_step(self) -> dict[str, float]:
        """One step of the optimizer; returns its row of the log, the norm before clipping."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.run_microbatches(self.batches, forward_only=False)
        _, norm, _ = self.optimizer.step()
        rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
        self.scheduler.step(increment=self.args.global_batch_size)
        self.step += 1
        return {"step": self.step, "loss": loss, "norm": float(norm), "lr": rate}

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Weights that are gathered as the forward needs them are gathered at once, and stay."""
        if self.args.overlap_param_gather:
            for chunk in self.model:
                chunk.disable_forward_pre_hook()
        yield
        if self.args.overlap_param_gather:
            for chunk in self.model:
                chunk.enable_forward_pre_hook()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the same held-out samples every time, in nats per byte."""
        with self.whole_weights():
            for chunk in self.model:
                chunk.eval()
            batches = self.iterate(self.validation, 0)
            losses = [self.run_microbatches(batches, forward_only=True) for _ in range(self.args.eval_iters)]
            for chunk in self.model:
                chunk.train()
        return sum(losses) / len(losses)

    # ---------------------------------------------------------------------------------------------- the run

    def run(self, device: torch.device) -> None:
        """To the last iteration, with a line now and then from rank 0."""
        args, entropy = self.args, self.corpus.unigram_entropy()
        throughput = gpt_report.Throughput(args, VOCABULARY, self.config.params_dtype, device)
        if args.rank == 0:
            self.introduce(entropy)
        show = gpt_report.start_progress(args.train_iters, self.step) if args.rank == 0 else lambda *unused: None
        while self.step < args.train_iters:
            start = time.perf_counter()
            row = self.train_step()
            throughput.add(time.perf_counter() - start)
            ends = self.step == args.train_iters or bool(args.exit_interval and self.step % args.exit_interval == 0)
            if args.eval_iters and (self.step % args.eval_interval == 0 or self.step == args.train_iters):
                row["validation"] = self.validate()
                throughput.measure_peak()
            self.log.append(row)
            validation = f", validation {row['validation']:.3f}" if "validation" in row else ""
            text = f"loss {row['loss']:.3f}, norm {row['norm']:.2f}, lr {row['lr']:.1e}"
            show(f"{text}, {throughput.describe_recent()}{validation}", bool(validation))
            if ends or self.step % args.save_interval == 0:
                with self.whole_weights():
                    gpt_checkpoint.save(self)
            if ends:
                break
        if args.rank == 0:
            self.summarize(entropy, throughput)

    def introduce(self, entropy: float) -> None:
        args, corpus = self.args, self.corpus
        weights = sum(p.numel() for chunk in self.model for p in chunk.parameters()) / 1e6
        names = {"tensor": args.tensor_model_parallel_size, "pipeline": args.pipeline_model_parallel_size,
                 "context": args.context_parallel_size, "expert": args.expert_model_parallel_size}  # fmt: skip
        sizes = "".join(f", {name}-parallel {size}" for name, size in names.items() if size > 1)
        ranks = f"{args.data_parallel_size} data-parallel rank{'s' * (args.data_parallel_size > 1)}"
        print(f"{weights:.1f} M parameters, backend {args.backend}, {ranks}{sizes} (parameters: of this rank)")
        held_out = corpus.tokens["validation"] / 1e6
        print(
            f"{corpus.name}: {corpus.tokens['train'] / 1e6:.1f} M training bytes, {held_out:.2f} M for validation, "
            f"unigram entropy {entropy:.3f} nats per byte"
        )

    def summarize(self, entropy: float, throughput: gpt_report.Throughput) -> None:
        final = next((r["validation"] for r in reversed(self.log) if "validation" in r), float("nan"))
        print(f"\nvalidation loss {final:.3f} nats per byte; unigram entropy {entropy:.3f}")
        if throughput.seconds:
            print(throughput.describe_all())
        folder = pathlib.Path(self.args.save)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.json").write_text(json.dumps(self.log))
        if self.log:
            gpt_report.plot(self.log, entropy, folder / "loss.png")
