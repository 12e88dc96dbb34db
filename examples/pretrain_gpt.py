"""Pretrain a Megatron-core GPT on text, compiled by the mindspeed backend.

python examples/pretrain_gpt.py                                    # 13 M parameters on the standard library's source,
minutes python examples/pretrain_gpt.py --backend inductor --data book.txt python examples/pretrain_gpt.py
--memory-budget 2GiB --check each  # every option of the backend: --help, docs/options.md python
examples/pretrain_gpt.py --resume                           # go on from the last checkpoint, bitwise as if never
stopped torchrun --nproc_per_node 4 examples/pretrain_gpt.py --tp 2        # data parallel 2 x tensor parallel 2, over
gloo on CPU python examples/pretrain_gpt.py --layers 32 --hidden 4096 --ffn 11008 --heads 32 --kv-heads 32 --seq 4096
# Llama-2-7B
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import pathlib
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

warnings.filterwarnings("ignore")  # Megatron-core warns of every optional package
logging.getLogger("megatron").setLevel(logging.ERROR)

import backend_options  # noqa: E402
from corpus import Corpus  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import mindspeed_fx.megatron_adaptor  # noqa: E402, F401


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    for name, value in dict(layers=8, hidden=384, heads=6, kv_heads=2, ffn=1024, seq=256).items():
        model.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    run = parser.add_argument_group("training")
    run.add_argument(
        "--data", nargs="+", metavar="FILE", help="text files; default: the Python standard library's source"
    )
    run.add_argument("--steps", type=int, default=400)
    run.add_argument("--batch", type=int, default=4, help="sequences per data-parallel rank and step")
    run.add_argument("--lr", type=float, default=1.5e-3)
    run.add_argument("--warmup", type=int, default=40, help="steps")
    run.add_argument("--weight-decay", type=float, default=0.1)
    run.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    run.add_argument("--eval-every", type=int, default=100)
    run.add_argument("--eval-batches", type=int, default=8)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--out", default="runs/gpt", help="checkpoint, log and plot go here")
    run.add_argument("--save-every", type=int, default=100)
    run.add_argument("--resume", action="store_true")
    run.add_argument(
        "--peak-tflops", type=float, help="peak for MFU; default: measured by matrix products of the model's type"
    )
    parallel = parser.add_argument_group("parallelism (under torchrun; data parallel takes the ranks that are left)")
    parallel.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parallel.add_argument("--sequence-parallel", action="store_true")
    backend = parser.add_argument_group("compiler")
    backend.add_argument("--backend", choices=("eager", "inductor", "mindspeed"), default="mindspeed")
    backend_options.add_arguments(backend)
    return parser.parse_args()


def build(args: argparse.Namespace) -> GPTModel:
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_heads,
        ffn_hidden_size=args.ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=getattr(torch, args.dtype),
        bf16=args.dtype == "bfloat16",
        pipeline_dtype=getattr(torch, args.dtype),
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=Corpus.vocabulary,
        max_sequence_length=args.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


class Trainer:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        options = backend_options.given(args, args.backend)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_ranks = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        self.out = pathlib.Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        try:
            self.corpus = Corpus(args.data, str(self.out.parent / "tokens"))
            self.corpus.require(args.seq)
        except (OSError, ValueError) as e:
            raise SystemExit(f"--data: {e}") from None
        self.model = build(args)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.95),
            foreach=True,
        )
        self.step, self.log = 0, []
        if args.resume:
            self.load()
        self.compiled = (
            self.model
            if args.backend == "eager"
            else torch.compile(self.model, backend=args.backend, **({"options": options} if options else {}))
        )

    # ---------------------------------------------------------------- one step

    def loss(self, part: str, seed: int) -> torch.Tensor:
        inputs, labels = self.corpus.batch(
            part, self.args.batch, self.args.seq, seed * self.data_ranks + self.data_rank
        )
        positions = torch.arange(self.args.seq).expand_as(inputs)
        return self.compiled(input_ids=inputs, position_ids=positions, attention_mask=None, labels=labels).mean()

    def train_step(self) -> tuple[float, float]:
        """One optimizer step; returns loss (mean over data-parallel ranks) and gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.loss("train", self.args.seed + self.step)
        loss.backward()
        self.reduce_gradients()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return self.mean(loss), norm

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        args = self.args
        if self.step < args.warmup:
            return args.lr * (self.step + 1) / args.warmup
        progress = (self.step - args.warmup) / max(1, args.steps - args.warmup)
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))

    def reduce_gradients(self) -> None:
        """Mean over data parallel; sum over tensor parallel for what sequence parallelism gave each rank a part of."""
        if self.data_ranks > 1:
            self.all_reduce(
                [p.grad for p in self.model.parameters() if p.grad is not None],
                parallel_state.get_data_parallel_group(),
                1 / self.data_ranks,
            )
        if self.args.sequence_parallel and self.args.tp > 1:
            self.all_reduce(
                [p.grad for p in self.model.parameters() if getattr(p, "sequence_parallel", False)],
                parallel_state.get_tensor_model_parallel_group(),
                1.0,
            )

    @staticmethod
    def all_reduce(grads: list[torch.Tensor], group: dist.ProcessGroup, factor: float) -> None:
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(grads, flat.mul_(factor).split([g.numel() for g in grads])):
            grad.copy_(part.view_as(grad))

    def clip(self) -> float:
        """Clip by the norm of the whole model: a tensor-parallel shard counts on its rank, a replica once."""
        total = torch.zeros((), dtype=torch.float64)
        for p in self.model.parameters():
            if p.grad is not None and (
                getattr(p, "tensor_model_parallel", False) or parallel_state.get_tensor_model_parallel_rank() == 0
            ):
                total += p.grad.double().square().sum()
        if self.args.tp > 1:
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        norm = total.sqrt().item()
        if norm > self.args.clip:
            torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], self.args.clip / norm)
        return norm

    def mean(self, value: torch.Tensor) -> float:
        value = value.detach().double().clone()
        if self.data_ranks > 1:
            dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        return value.item() / self.data_ranks

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the same held-out windows every time, in nats per byte."""
        return (
            sum(self.mean(self.loss("validation", 10_000_000 + i)) for i in range(self.args.eval_batches))
            / self.args.eval_batches
        )

    # ---------------------------------------------------------------- checkpoint

    def path(self) -> pathlib.Path:
        return self.out / f"checkpoint.tp{parallel_state.get_tensor_model_parallel_rank()}of{self.args.tp}.pt"

    def save(self) -> None:
        """Replace the last checkpoint, whole or not at all."""
        if self.data_rank == 0:
            state = {
                "model": {k: v for k, v in self.model.state_dict().items() if isinstance(v, torch.Tensor)},
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "log": self.log,
                "settings": self.settings(),
                "rng": torch.get_rng_state(),
            }
            temporary = self.path().with_suffix(".tmp")
            torch.save(state, temporary)
            os.replace(temporary, self.path())

    def load(self) -> None:
        if not self.path().exists():
            raise SystemExit(f"--resume: there is no checkpoint {self.path()}")
        state = torch.load(self.path(), weights_only=True)
        stored, now = state["settings"], self.settings()
        if other := [
            f"{'--' * hasattr(self.args, n)}{n.replace('_', '-')} {stored.get(n)}, not {now[n]}"
            for n in now
            if stored.get(n) != now[n]
        ]:
            raise SystemExit(f"--resume: {self.path()} was written with {'; '.join(other)}")
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.log = state["step"], state["log"]
        torch.set_rng_state(state["rng"])

    def settings(self) -> dict:
        """All that the next step depends on, but for the backend: a run goes on with another one, the same to
        rounding.
        """
        names = (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "ffn",
            "seq",
            "dtype",
            "batch",
            "steps",
            "lr",
            "warmup",
            "weight_decay",
            "clip",
            "seed",
            "tp",
            "sequence_parallel",
        )
        return {
            **{n: getattr(self.args, n) for n in names},
            "data": f"text {self.corpus.fingerprint}",
            "data_parallel_ranks": self.data_ranks,
        }

    # ---------------------------------------------------------------- the run

    def flops_per_token(self) -> float:
        """Forward and backward: 6 per weight of a matrix product, and causal attention's two products."""
        weights = sum(
            p.numel() * (self.args.tp if getattr(p, "tensor_model_parallel", False) else 1)
            for n, p in self.model.named_parameters()
            if p.dim() > 1 and "word_embeddings" not in n
        )
        return 6 * weights + 6 * self.args.layers * self.args.hidden * self.args.seq

    def run(self) -> None:
        args, first = self.args, self.rank == 0
        entropy = self.corpus.unigram_entropy()
        peak = (args.peak_tflops or measured_tflops(getattr(torch, args.dtype))) * 1e12
        if first:
            weights = sum(p.numel() for p in self.model.parameters())
            print(
                f"{weights / 1e6:.1f} M "
                f"parameters{f' on each of {args.tp} tensor-parallel ranks' if args.tp > 1 else ''}, backend "
                f"{args.backend}, {self.data_ranks} data-parallel rank{'s' * (self.data_ranks > 1)}"
            )
            print(
                f"{self.corpus.name}: {len(self.corpus.train) / 1e6:.1f} M training bytes, "
                f"{len(self.corpus.validation) / 1e6:.2f} M for validation, unigram entropy {entropy:.3f} nats per byte"
            )
        tokens = args.batch * args.seq * self.data_ranks
        bar = progress(args.steps, self.step) if first else None
        times: list[float] = []
        while self.step < args.steps:
            start = time.perf_counter()
            loss, norm = self.train_step()
            times.append(time.perf_counter() - start)
            rate = tokens / sorted(times[-20:])[len(times[-20:]) // 2]
            mfu = utilization(rate * self.flops_per_token(), peak * self.world)
            row = {"step": self.step, "loss": loss, "norm": norm}
            if self.step % args.eval_every == 0 or self.step == args.steps:
                row["validation"] = self.validate()
            self.log.append(row)
            if first:
                validation = f", validation {row['validation']:.3f}" if "validation" in row else ""
                bar(
                    f"loss {loss:.3f}, norm {norm:.2f}, lr {self.learning_rate():.1e}, {rate:.0f} tokens/s, "
                    f"{mfu}{validation}",
                    bool(validation),
                )
            if self.step % args.save_every == 0 or self.step == args.steps:
                self.save()
        if first:
            final = next((r["validation"] for r in reversed(self.log) if "validation" in r), float("nan"))
            steady = sorted(times[1:])[len(times[1:]) // 2] if len(times) > 1 else float("nan")
            print(f"\nvalidation loss {final:.3f} nats per byte; unigram entropy {entropy:.3f}")
            if times:
                mfu = utilization(tokens / steady * self.flops_per_token(), peak * self.world)
                print(
                    f"first step (with compilation) {times[0]:.1f} s, median step {steady * 1e3:.0f} ms, "
                    f"{tokens / steady:.0f} tokens/s, {mfu} of {peak / 1e12:.2f} TFLOP/s per rank"
                )
            (self.out / "log.json").write_text(json.dumps(self.log))
            plot(self.log, entropy, self.out / "loss.png")


def progress(total: int, done: int):
    """Returns ``show(text, keep)``: a bar on a terminal, a line now and then in a log file."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not os.isatty(2):
        count = [done]

        def show(text: str, keep: bool) -> None:
            count[0] += 1
            if keep or count[0] <= 2 or count[0] % 25 == 0:
                print(f"step {count[0]}/{total}: {text}", flush=True)

        return show
    bar = tqdm(total=total, initial=done, dynamic_ncols=True)

    def show(text: str, keep: bool) -> None:
        bar.update(1)
        bar.set_postfix_str(text)
        if keep:
            bar.write(f"step {bar.n}: {text}")

    return show


def plot(log: list[dict], entropy: float, path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'mindspeed-fx[report]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([r["step"] for r in log], [r["loss"] for r in log], linewidth=0.8, alpha=0.7, label="training")
    points = [(r["step"], r["validation"]) for r in log if "validation" in r]
    axes.plot(*zip(*points), marker="o", label="validation")
    axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def measured_tflops(
    dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (256, 512, 1024), times: int = 5
) -> float:
    """Best rate of a matrix product on this rank's threads: the peak that MFU is measured against.

    The fastest size counts, and the processor's time where it is shorter than the clock's: on a busy machine a product
    waits for others, and a peak measured then would be one that a later, quieter step exceeds.
    """
    best, threads = 0.0, torch.get_num_threads()
    for n in sizes:
        a, b = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype)
        for _ in range(times):
            clock, processor = time.perf_counter(), time.process_time()
            a @ b
            processor = (time.process_time() - processor) / threads
            clock = time.perf_counter() - clock
            best = max(best, 2 * n**3 / max(min(clock, processor or clock), 1e-9))
    return best / 1e12


def utilization(rate: float, peak: float) -> str:
    """Model FLOP utilization in words; unknown where the model is faster than ``peak``, which then is none."""
    return f"MFU {rate / peak:.0%}" if rate <= peak else "MFU unknown, the model is faster than the peak"


def main() -> None:
    args = arguments()
    if "RANK" not in os.environ:
        # One process: a store in a file needs no port.
        import tempfile

        store = dist.FileStore(tempfile.mktemp(), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    if dist.get_world_size() % args.tp:
        raise SystemExit(f"--tp {args.tp} does not divide the {dist.get_world_size()} processes")
    if args.sequence_parallel and args.tp == 1:
        raise SystemExit("--sequence-parallel divides what --tp leaves whole; --tp is 1")
    parallel_state.initialize_model_parallel(args.tp)
    try:
        Trainer(args).run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
