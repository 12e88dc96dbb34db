"""Two gloo processes and a slow link: a training step with and without overlap, same values.

    python -m benchmarks.overlap_gloo --delay 0.03

The link is a process group whose collectives end only ``delay`` seconds after they started (one at a time, as on a
link),
while the processor is free: an injected delay, not a network. Of a layer's five products four need no communication, as
weight gradients do; the delays add up to four fifths of the compute, so 1.8 is the most that overlap can gain. Both
rivals run the same graph with codegen "eager"; one has overlap.schedule on.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from typing import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Link:
    """Ends collectives no earlier than their start, the end of the one before and ``delay`` allow."""

    def __init__(self, delay: float):
        self.delay, self.free = delay, 0.0
        self.ends: dict[int, float] = {}
        self.works: dict[int, dist.Work] = {}

    def started(self, tensor: torch.Tensor) -> None:
        self.free = max(self.free, time.perf_counter()) + self.delay
        self.ends[tensor.data_ptr()] = self.free

    def waited(self, tensor: torch.Tensor) -> None:
        remaining = self.ends.pop(tensor.data_ptr(), 0.0) - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)


def install(link: Link) -> None:
    """Put the link behind the functional collectives that the step uses, on CPU tensors."""

    def all_reduce(x, op, group):
        out = x.clone()
        link.works[out.data_ptr()] = dist.all_reduce(out, group=dist.group.WORLD, async_op=True)
        link.started(out)
        return out

    put_behind(link, "all_reduce", all_reduce)


def put_behind(link: Link, name: str, collective: Callable[..., torch.Tensor]) -> None:
    """Have ``collective``, which leaves its work with the link, stand for a functional collective of CPU tensors."""
    functional = torch.library.Library("_c10d_functional", "IMPL")

    def wait_tensor(x):
        work = link.works.pop(x.data_ptr(), None)
        if work is not None:
            work.wait()
            link.waited(x)
        return x

    functional.impl(name, collective, "CPU", allow_override=True)
    functional.impl("wait_tensor", wait_tensor, "CPU", allow_override=True)
    link.library = functional  # the registrations live as long as this


def step(x, weights):
    """Layers of: a product, its reduction (needed by the next layer), and four products that need no communication."""
    import torch.distributed._functional_collectives as functional

    side = []
    for w in weights:
        y = functional.wait_tensor(functional.all_reduce(x @ w, "sum", dist.group.WORLD))
        side += [x.t() @ x, x @ x, w.t() @ x, x.t() @ w]
        x = torch.tanh(y * 0.01)
    return x, *side


def worker(rank: int, store: str, delay: float, size: int, layers: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    link = Link(0.0)
    install(link)
    weights = [torch.randn(size, size, generator=torch.Generator().manual_seed(n)) for n in range(layers)]
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(100 + rank))
    rivals = {}
    for name, extra in (("no overlap", {"disable": ["overlap.*"]}), ("overlap", {})):
        torch._dynamo.reset()
        rivals[name] = torch.compile(
            step,
            backend="mindspeed",
            options={"codegen": "eager", "hardware": "ascend910b2", "overlap_memory": "1GiB", **extra},
            fullgraph=True,
        )
        rivals[name](x, weights)
    same = all(
        torch.equal(a, b) for a, b in zip(rivals["overlap"](x, weights), rivals["no overlap"](x, weights), strict=True)
    )
    alone = []
    for _ in range(5):
        begin = time.perf_counter()
        rivals["no overlap"](x, weights)
        alone.append(time.perf_counter() - begin)
    shared = [statistics.median(alone)]
    dist.broadcast_object_list(shared, src=0)
    compute = shared[0]
    link.delay = delay or 0.8 * compute / layers
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            dist.barrier()
            begin = time.perf_counter()
            run(x, weights)
            times[name].append(time.perf_counter() - begin)
    if rank == 0:
        middle = {name: statistics.median(t) for name, t in times.items()}
        print(
            f"# {datetime.date.today()} torch {torch.__version__}, two gloo processes, one thread each, {layers} "
            f"layers of {size}, machine shared with other work"
        )
        print(
            f"without any delay {compute * 1e3:.1f} ms; injected delay {link.delay * 1e3:.1f} ms for each of {layers} "
            f"collectives ({link.delay * layers * 1e3:.1f} ms)"
        )
        for name, t in times.items():
            print(f"{name:<12} median {middle[name] * 1e3:8.1f} ms  min {min(t) * 1e3:8.1f}  max {max(t) * 1e3:8.1f}")
        paired = statistics.median(a / b for a, b in zip(times["no overlap"], times["overlap"]))
        print(
            f"speed-up {middle['no overlap'] / middle['overlap']:.2f} (paired {paired:.2f}); same values bitwise: "
            f"{same}"
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--delay", type=float, default=0.0, help="seconds per collective; 0: four fifths of a layer's compute"
    )
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store", args.delay, args.size, args.layers, args.rounds), nprocs=2)


if __name__ == "__main__":
    main()
