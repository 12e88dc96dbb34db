"""The training loop of train_hf.py."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import time
from argparse import Namespace
from typing import Any

import hf_models
import hf_plan
import hf_report
import torch
import torch.distributed as dist
from gpt_report import plot, start_progress
from hf_arguments import DTYPES, fail
from hf_checkpoint import Checkpoints
from hf_data import TRAINING, VALIDATION, Bytes, Documents, Loader, Pretrained, TextBatches, perplexity
from hf_images import Digits, ImageBatches
from hf_stages import Pipeline
from torch import nn
from torch.distributed.tensor import DTensor

Batch = dict[str, torch.Tensor]


class Trainer:
    """The model with its plan, optimizer, schedule and data, as far as it has come.

    Attributes: ``step``: steps that are done; ``log``: a row for each.
    """

    def __init__(self, args: Namespace):
        self.args, self.device = args, hf_plan.find_device(args)
        self.vocabulary = open_vocabulary(args)
        config = hf_models.make_config(args, self.vocabulary)
        self.vocabulary.start = hf_models.first_of_decoder(config, self.vocabulary)
        losses = hf_models.LOSSES[args.kind](hf_models.build_model(args, config))
        self.documents, self.batches = open_data(args, self.vocabulary, losses)
        example = self.batches[TRAINING][0]
        plan, sizes = hf_plan.choose_plan(args, losses, example)
        hf_plan.start_processes(args)
        if args.plan == "search":
            plan, sizes = hf_plan.share_plan(plan, sizes)
        self.microbatches = count_microbatches(args, plan, sizes)
        self.plan, self.sizes = plan, sizes
        self.parameters = sum(p.numel() for p in losses.parameters())
        part = next(iter(self.split(example)))
        work, self.counted = hf_report.flops_of(losses, part)
        self.flops_per_element = work / part["labels"].numel()
        self.saved = set(losses.model.state_dict())
        self.pipeline: Pipeline | None = None
        if "pp" in sizes:
            how = plan, sizes, example, self.microbatches, self.device, self.casts
            self.pipeline = Pipeline(args, losses, *how)
            self.losses = self.pipeline.module
        else:
            self.losses = hf_plan.divide(args, losses, plan, sizes, self.device)
            self.compiled = compile_losses(args, self.losses)
        self.optimizer, self.scheduler = make_optimizer(args, self.losses)
        self.loader = Loader(self.batches[TRAINING], args.workers)
        self.step, self.log = 0, []
        torch.manual_seed(args.seed)  # the same on all ranks: dropout draws what one device draws
        self.checkpoints = Checkpoints(args)
        self.resumed = self.checkpoints.load(self)

    # ------------------------------------------------------------------------------------------------ one step

    def split(self, batch: Batch) -> list[Batch]:
        """The microbatches of a global batch."""
        size = self.args.batch_size // self.microbatches
        return [{n: t[i * size : (i + 1) * size] for n, t in batch.items()} for i in range(self.microbatches)]

    def casts(self) -> Any:
        """What products are computed in: bfloat16 if so asked."""
        mixed = self.args.dtype == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else contextlib.nullcontext()

    def run(self, batch: Batch) -> torch.Tensor:
        """The sum of the losses of a microbatch."""
        with self.casts():
            return self.compiled(**{name: tensor.to(self.device) for name, tensor in batch.items()})

    def train_step(self) -> dict[str, float]:
        """One step of the optimizer; returns its row of the log, the norm before clipping."""
        start, batch = time.perf_counter(), next(self.loader)
        labels = max(count_labels(batch), 1)
        self.optimizer.zero_grad()
        total = self.run_backward(batch, labels)
        if not math.isfinite(total):
            fail(f"the loss of step {self.step + 1} is {total}; a lower --lr than {self.args.lr} may help")
        row = {"step": self.step + 1, "loss": total, "lr": self.scheduler.get_last_lr()[0]}
        row["norm"] = self.clip(self.args.clip or math.inf)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return row | {"seconds": time.perf_counter() - start, "elements": batch["labels"].numel()}

    def run_backward(self, batch: Batch, labels: int) -> float:
        """Gradients of a global batch; its loss."""
        if self.pipeline is not None:
            return self.pipeline.step({n: t.to(self.device) for n, t in batch.items()}, labels)
        total = 0.0
        for part in self.split(batch):
            loss = self.run(part) / labels
            loss.backward()
            total += loss.item()
        return total

    def clip(self, most: float) -> float:
        """The norm of all gradients, which are scaled to ``most``."""
        if self.pipeline is not None:
            return self.pipeline.clip(most)
        norm = torch.nn.utils.clip_grad_norm_(self.losses.parameters(), most)
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the same held-out batches every time, in nats."""
        module = self.losses if self.pipeline is None else self.pipeline
        module.train(False)
        total, labels = 0.0, 0
        for number in range(self.args.eval_batches):
            batch = self.batches[VALIDATION][number]
            labels += count_labels(batch)
            if self.pipeline is not None:
                total += self.pipeline.evaluate({n: t.to(self.device) for n, t in batch.items()})
            else:
                total += sum(self.run(part).item() for part in self.split(batch))
        module.train(True)
        return total / max(labels, 1)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def read_state(self) -> dict[str, Any]:
        """What a checkpoint has beside tensors."""
        own = {"step": self.step, "log": self.log, "data": self.loader.state_dict()}
        return own | {"scheduler": self.scheduler.state_dict()}

    def write_state(self, state: dict[str, Any]) -> None:
        """What :meth:`read_state` gave."""
        self.step, self.log = state["step"], state["log"]
        self.loader.load_state_dict(state["data"])
        self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    # ------------------------------------------------------------------------------------------------ the run

    def train(self) -> None:
        """To the last step, with a line now and then from rank 0."""
        args, first = self.args, self.args.rank == 0
        through = hf_report.Throughput(
            args.world_size, args.peak_tflops, DTYPES[args.dtype], self.device, self.documents.unit
        )
        if first:
            self.introduce()
        show = start_progress(args.steps, self.step) if first else lambda *unused: None
        end = min(args.steps, args.stop_after or args.steps)
        while self.step < end:
            row = self.train_step()
            through.add(row.pop("seconds"), row["elements"], row["elements"] * self.flops_per_element)
            if args.eval_batches and (self.step % args.eval_every == 0 or self.step == args.steps):
                row["validation"] = self.validate()
                through.measure_peak()
            self.log.append(row)
            text = f"loss {row['loss']:.3f}, norm {row['norm']:.2f}, lr {row['lr']:.1e}, {through.describe()}"
            held_out = f", validation {row['validation']:.3f}" if "validation" in row else ""
            show(text + held_out, bool(held_out))
            self.checkpoints.poll()
            if self.step == end or self.step % args.save_every == 0:
                self.checkpoints.save(self)
        self.checkpoints.finish()
        self.summarize(through)

    def introduce(self) -> None:
        args = self.args
        mesh = " x ".join(f"{d} {n}" for d, n in self.sizes.items())
        plan = f"plan {self.plan.name} on {mesh}" if self.plan is not None else "one device"
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        parts += f", schedule {self.pipeline.name}" if self.pipeline is not None else ""
        print(f"{args.model} ({args.kind}), {self.parameters / 1e6:.2f} M parameters, backend {args.backend}, {plan}, "
              f"{args.dtype} on {self.device.type}{parts}")  # fmt: skip
        print(self.documents.describe())
        if self.resumed:
            print(f"goes on from step {self.step} of {args.save}", flush=True)

    def summarize(self, through: hf_report.Throughput) -> None:
        """The last losses, a plot and a sample, which all ranks make."""
        args, unit = self.args, self.documents.unit
        ended = self.step == args.steps
        text = args.kind in ("causal", "seq2seq") and args.sample_length and ended
        if args.rank == 0:
            final = next((r["validation"] for r in reversed(self.log) if "validation" in r), float("nan"))
            words = f", perplexity {perplexity(final)}" if unit == "token" else ""
            known = "unigram entropy" if unit == "token" else "chance"
            print(f"\nvalidation loss {final:.3f} nats per {unit}{words}; {known} {self.documents.entropy:.3f}")
            if through.steps:
                print(f"{through.describe_all()}; {self.counted})")
            folder = pathlib.Path(args.save)
            (folder / "log.json").write_text(json.dumps(self.log))
            if self.log:
                plot(self.log, self.documents.entropy, folder / "loss.png", unit, known)
        if text:
            batch = {n: t.to(self.device) for n, t in self.batches[VALIDATION][0].items()}
            how = args.kind, batch, self.vocabulary, args.sample_length
            own = self.pipeline
            line = own.sample(*how) if own is not None else hf_report.sample(self.losses.model, *how)
            if args.rank == 0:
                print(line)
        if dist.is_initialized():
            dist.barrier()


def open_vocabulary(args: Namespace) -> Any:
    """Of the tokenizer beside pretrained weights, else bytes."""
    folder = args.from_pretrained
    if folder and any((pathlib.Path(folder) / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        with hf_models.refusals("--from-pretrained"):
            return Pretrained(folder)
    return Bytes()


def open_data(args: Namespace, vocabulary: Any, losses: nn.Module) -> tuple[Any, list[Any]]:
    """(what there is to read, batches for training and for validation); sets ``args.packed``."""
    if args.kind == "vision":
        if args.buckets or args.packed or args.data:
            fail("--data, --packed and --buckets are for text; --kind vision draws its images")
        digits = Digits()
        return digits, [ImageBatches(args, digits, None, part, False) for part in (TRAINING, VALIDATION)]
    sees = "its kind is " + args.kind
    if args.kind == "causal" and not args.buckets and args.packed is not False:
        sees = hf_models.sees_other_documents(losses, losses.model.config.vocab_size)
        if sees and args.packed is None and args.rank == 0:
            print(f"documents in a row see each other: {sees}")
    if args.packed and sees:
        fail(f"--packed: documents in a row of {args.model} would see each other: {sees}")
    args.packed = args.kind == "causal" and not args.buckets and args.packed is not False and not sees
    try:
        documents = Documents(args.data, vocabulary)
        largest = getattr(losses.model.config, "vocab_size", vocabulary.size)
        if largest < vocabulary.size:
            fail(f"--config: vocab_size {largest} is less than the {vocabulary.size} tokens of the text")
        return documents, [
            TextBatches(args, documents, vocabulary, part, args.packed) for part in (TRAINING, VALIDATION)
        ]
    except (OSError, ValueError) as error:
        fail(f"--data: {error}")


def count_microbatches(args: Namespace, plan: Any, sizes: dict[str, int]) -> int:
    """Those that were asked for, else the searched plan's, else one for each stage of a pipeline."""
    count = args.accumulate or getattr(plan, "microbatches", None) or sizes.get("pp", 1)
    if args.batch_size % count:
        fail(
            f"--batch-size {args.batch_size} cannot be divided into the {count} microbatches of plan {plan.name}; "
            "give --accumulate"
        )
    return count


def count_labels(batch: Batch) -> int:
    return int((batch["labels"] != hf_models.IGNORED).sum())


def compile_losses(args: Namespace, losses: nn.Module) -> Any:
    """One graph for each length, in training and in validation."""
    losses.train()
    if args.backend == "eager":
        return losses
    torch._dynamo.config.recompile_limit = 8 + 4 * len(args.buckets or ())
    options = {"options": args.options} if args.options else {}
    return torch.compile(losses, backend=args.backend, dynamic=False, **options)


def make_optimizer(args: Namespace, losses: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, whose states lie as the parameters, without decay of vectors; a warm-up and half a cosine."""
    trained = [p for p in losses.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, betas=tuple(args.betas))
    least = args.min_lr / args.lr if args.lr else 0.0

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / (args.warmup + 1)
        rest = min((step - args.warmup) / max(args.steps - args.warmup, 1), 1.0)
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * rest))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
