"""Every Triton kernel and whole model on a CUDA device beside eager PyTorch, Inductor, torch's own fused operators and,
where installed, Liger (liger-kernel).

    make bench-gpu
    python -m benchmarks.gpu [--out build/bench_gpu.jsonl] [--only GLOB ...] [--processes 16] [--seconds 240]
        [--rounds 20]
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --elements 65536 --rounds 1 --only "rms_norm*"
        tries the script itself

First values, in processes beside each other: every kernel's result and gradients against float64 (float32 for
recurrences), a model's gradients against eager PyTorch's; what is not compiled when --seconds are over has no times.
Then times, one problem at a time: medians over interleaved rounds, one call at a time between device events, a kernel
behind a large copy that hides the launch and empties the L2 cache. Shares are of the time that the device computes, by
the profiler: what must move, every input read once and every output written once, of the copy's own bandwidth, or the
operations of the products of a large product's. Of models also the time that the device is busy for, and in --out that
of each kernel. Liger's losses compute their gradient in the forward: compare the sum of both. What was measured stands
in --out, and is not measured again.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch

from benchmarks import common

from .measure import KERNELS, Meter
from .models import MODELS
from .table import Book, print_kernels, print_models
from .worker import serve

LONGEST = 90
"""Seconds for the times of one problem; a process that takes longer is given up."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("build/bench_gpu.jsonl"))
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="problems and models")
    parser.add_argument("--elements", type=int, default=2**26, help="of the largest input of norms, gates and losses")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=16, help="that compile beside each other")
    parser.add_argument("--seconds", type=float, default=240.0, help="for compiling")
    args = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    book = Book(args.out)
    names = [n for n in [*MODELS, *KERNELS] if any(fnmatch.fnmatch(n, glob) for glob in args.only)]
    names = [n for n in names if n in KERNELS] if args.device == "cpu" else names
    measure(book, [n for n in names if ("times", n) not in book.done], args)
    print_kernels(book)
    if args.device == "cuda":
        print_models(book)


def measure(book: Book, names: list[str], args: argparse.Namespace) -> None:
    """Values of ``names`` in several processes, then their times one by one, into the book."""
    context, deadline = multiprocessing.get_context("spawn"), time.time() + args.seconds
    running, pipes = {}, {}
    for i in range(min(args.processes, len(names))):
        pipe, end = context.Pipe()
        own = names[i :: args.processes]
        running[pipe] = context.Process(target=serve, args=(own, args.device, args.elements, deadline, end))
        running[pipe].start()
        pipes.update(dict.fromkeys(own, pipe))
    waiting = set(pipes.values())
    while waiting and time.time() < deadline + 20:  # a call into the compiler is not interrupted
        for pipe in wait(list(waiting), timeout=5):
            answer = pipe.recv()
            if answer is None:
                waiting.remove(pipe)
            else:
                name, values, work = answer
                book.add("values", name, values)
                book.add("work", name, work)
                print(f"# {name}: {values}", flush=True)
    for name in names:
        if pipes[name] in waiting:
            print(f"# {name}: no times, its process still compiles", flush=True)
            running[pipes[name]].kill()  # it would share the device
    common.header(f"on {torch.cuda.get_device_name() if args.device == 'cuda' else 'the interpreter: no times'}")
    meter = Meter(args.device, args.elements)
    book.add("ceilings", "copy", meter.copy_bandwidth())
    book.add("ceilings", "product", meter.product_rate())
    del meter
    for name in names:
        if pipes[name] in waiting or isinstance(book.done["values", name].get("mindspeed"), str):
            continue
        pipes[name].send((name, args.rounds))
        if not pipes[name].poll(LONGEST):
            waiting.add(pipes[name])
            print(f"# {name}: no times in {LONGEST} s", flush=True)
            continue
        result = pipes[name].recv()
        if isinstance(result, str):
            print(f"# {name}: no times: {result}", flush=True)
            continue
        book.add("times", name, result)
    for process in running.values():
        process.kill()


if __name__ == "__main__":
    main()
