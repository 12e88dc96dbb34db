"""What pretrain_gpt.py shows: a line now and then, utilization of the device, a plot."""

from __future__ import annotations

import os
import pathlib
import time
from argparse import Namespace
from typing import Callable

import torch


def flops_per_token(args: Namespace, vocabulary: int) -> float:
    """Forward and backward: 6 per weight of a matrix product that a token meets, and causal attention's two products.

    Of experts a token meets ``--moe-router-topk`` (Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters", without recomputation; a causal score is computed for half of the keys).
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.multi_latent_attention:
        keys, values = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
        attention = args.q_lora_rank * (hidden + heads * keys)
        attention += hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
        attention += args.kv_lora_rank * heads * (args.qk_head_dim + values) + heads * values * hidden
    else:
        keys = values = hidden // heads
        attention = hidden * keys * (2 * heads + 2 * args.num_query_groups)
    feed_forward = 3 * hidden * args.ffn_hidden_size
    if args.num_experts:
        expert = args.moe_ffn_hidden_size or args.ffn_hidden_size
        shared = args.moe_shared_expert_intermediate_size or 0
        feed_forward = 3 * hidden * (args.moe_router_topk * expert + shared) + hidden * args.num_experts
    weights = args.num_layers * (attention + feed_forward) + hidden * vocabulary
    return 6 * weights + 3 * args.num_layers * heads * (keys + values) * args.seq_length


def measured_tflops(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sizes: tuple[int, ...] = (256, 512, 1024),
    times: int = 5,
) -> float:
    """Best rate of torch's matrix product of ``dtype`` on this rank's device: the peak that MFU is measured against.

    The fastest size counts; on a CPU the processor's time where it is shorter than the clock's: on a busy machine a
    product waits for others, and a peak measured then would be one that a later, quieter step exceeds.
    """
    best, threads = 0.0, torch.get_num_threads()
    accelerator = torch.device(device).type != "cpu"
    synchronize = torch.cuda.synchronize if accelerator else bool
    for n in (1024, 4096, 8192) if accelerator else sizes:
        a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
        for _ in range(times):
            synchronize()
            clock, processor = time.perf_counter(), time.process_time()
            a @ b
            synchronize()
            processor = 0.0 if accelerator else (time.process_time() - processor) / threads
            clock = time.perf_counter() - clock
            best = max(best, 2 * n**3 / max(min(clock, processor or clock), 1e-9))
    return best / 1e12


def utilization(rate: float, peak: float) -> str:
    """Model FLOP utilization in words; unknown where the model is faster than ``peak``, which then is none."""
    return f"MFU {rate / peak:.0%}" if rate <= peak else "MFU unknown, the model is faster than the peak"


class Throughput:
    """Tokens and FLOP a second, of which utilization is told.

    Args:
        args: of the run.
        vocabulary: rows of the output layer.
        dtype, device: of the matrix products.
    """

    def __init__(self, args: Namespace, vocabulary: int, dtype: torch.dtype, device: torch.device):
        self.tokens = args.global_batch_size * args.seq_length
        self.flops, self.world = flops_per_token(args, vocabulary), args.world_size
        self.given, self.dtype, self.device = args.peak_tflops, dtype, device
        self.peak, self.seconds = 0.0, []
        self.measure_peak()

    def measure_peak(self) -> None:
        """Raises the peak where the device does more now than before: a machine is not always as busy."""
        self.peak = max(self.peak, self.given or measured_tflops(self.dtype, self.device))

    def add(self, seconds: float) -> None:
        """A step has taken so long."""
        self.seconds.append(seconds)

    def describe(self, seconds: list[float]) -> str:
        """Tokens a second and utilization, by the median of ``seconds``."""
        median = sorted(seconds)[len(seconds) // 2]
        mfu = utilization(self.tokens / median * self.flops, self.peak * 1e12 * self.world)
        return f"{self.tokens / median:.0f} tokens/s, {mfu}"

    def describe_recent(self) -> str:
        return self.describe((self.seconds[1:] or self.seconds)[-20:])

    def describe_all(self) -> str:
        """The first step and the median of the rest; where a run is of one step, that."""
        rest = self.seconds[1:] or self.seconds
        median = sorted(rest)[len(rest) // 2]
        return (
            f"first step (with compilation) {self.seconds[0]:.1f} s, median step {median * 1e3:.0f} ms, "
            f"{self.describe(rest)} of {self.peak:.2f} TFLOP/s per rank ({str(self.dtype).removeprefix('torch.')}, "
            f"{'given' if self.given else 'the best product measured'})"
        )


def start_progress(total: int, done: int) -> Callable[[str, bool], None]:
    """Returns ``show(text, keep)``: a bar on a terminal, a line now and then in a log file."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not os.isatty(2):
        first = count = done

        def show(text: str, keep: bool) -> None:
            nonlocal count
            count += 1
            if keep or count - first <= 2 or count % 25 == 0:
                print(f"step {count}/{total}: {text}", flush=True)

        return show
    bar = tqdm(total=total, initial=done, dynamic_ncols=True)

    def show_bar(text: str, keep: bool) -> None:
        bar.update(1)
        bar.set_postfix_str(text)
        if keep:
            bar.write(f"step {bar.n}: {text}")

    return show_bar


def plot(
    log: list[dict], entropy: float, path: pathlib.Path, unit: str = "byte", known: str = "unigram entropy"
) -> None:
    """Losses of every step, and of validation, into ``path``; ``known``: what has a loss of ``entropy``."""
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
    if points:
        axes.plot(*zip(*points), marker="o", label="validation")
    axes.axhline(entropy, linestyle="--", color="gray", label=known)
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")
