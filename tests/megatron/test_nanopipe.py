"""Gradients of weights made late: their values, and the bubble of Megatron's interleaved schedule by event order."""

from __future__ import annotations

import copy

import pytest
import torch

from mindspeed_fx.compat import dynamo
from mindspeed_fx.megatron import nanopipe
from mindspeed_fx.training.late_gradients import Queue, put_off

FORWARD, INPUT, WEIGHTS = "F", "D", "W"


@pytest.mark.parametrize("dtype, main_grad", [(torch.float64, False), (torch.float64, True), (torch.bfloat16, True)])
def test_two_micro_batches_and_their_late_gradients(dtype, main_grad):
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).to(dtype)
    parts, queue = copy.deepcopy(whole), Queue()
    put_off(parts.parameters(), queue)
    for module in (whole, parts):
        dynamo.compile_alone(module, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    for weight in parts.parameters():
        if main_grad:
            weight.main_grad = torch.zeros_like(weight)
    batches = [torch.randn(4, 8, dtype=dtype) for _ in range(2)]
    results = []
    for module in (whole, parts):
        sources = [b.clone().requires_grad_() for b in batches]
        outs = [module(s) for s in sources]
        for out in outs:
            out.square().sum().backward()
        results.append(([o.detach() for o in outs], [s.grad for s in sources]))
    for one, other in zip(*results):
        assert all(torch.equal(a, b) for a, b in zip(one, other))
    assert len(queue) == 2 and all(w.grad is None for w in parts.parameters())
    while len(queue):
        queue.run_one()
    for weight, late in zip(whole.parameters(), parts.parameters()):
        gradient = late.main_grad if main_grad else late.grad
        assert weight.grad.abs().sum() > 0 and torch.equal(weight.grad, gradient)


def test_what_waits_is_in_host_memory():
    """Bits of the run without; while others wait, the tensors of all but the newest and the next are not there."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    swapped, queue = copy.deepcopy(whole), Queue(swaps=True, smallest=1024)
    put_off(swapped.parameters(), queue)
    for module in (whole, swapped):
        dynamo.compile_alone(module, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    batches, number = [torch.randn(256, 64) for _ in range(4)], 4
    for module in (whole, swapped):
        for batch in batches:
            module(batch.clone().requires_grad_()).square().sum().backward()
    there = [sum(isinstance(v, torch.Tensor) and v.numel() >= 256 for v in e.values) for e in queue.away]
    sizes = [sum(host.numel() * 4 for host, _ in e.hosts.values()) for e in queue.away]
    # of a batch: its rows, what the activation reads, its result and gradient, and the gradient of the output
    assert there[:3] == [0] * 3 and there[3] >= 3 and len(queue) == number, there
    assert sizes[0] == sizes[1] == sizes[2] >= 256 * (64 + 128 + 128) * 4 and sizes[3] == 0
    while len(queue):
        queue.run_one()
        assert [bool(e.coming) for e in queue.away] == [True, *[False] * (len(queue) - 1)][: len(queue)]
    for weight, late in zip(whole.parameters(), swapped.parameters()):
        assert weight.grad.abs().sum() > 0 and torch.equal(weight.grad, late.grad)


def test_generated_code_is_refused():
    layer = torch.nn.Linear(2, 2)
    put_off(layer.parameters(), Queue())
    with pytest.raises(Exception, match='"codegen" is "inductor"; valid where gradients of weights are made late'):
        torch.compile(layer, backend="mindspeed", options={"codegen": "inductor"})(torch.ones(1, 2))


def events(ranks: int, rank: int, stages: int, microbatches: int, late: bool) -> list[tuple[str, int, int]]:
    """Of a rank in Megatron's interleaved order: what, which micro-batch, which chunk."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(microbatches, stages, ranks)
    order: list[tuple[str, int, int]] = []
    queue = Queue()
    run = nanopipe.Run(queue, rank)
    warmup = min(2 * (ranks - rank - 1) + (stages - 1) * ranks, len(table))
    for k in range(len(table) + warmup):
        if k < len(table):
            order.append((FORWARD, *table[k]))
        if k >= warmup:
            number, chunk = table[k - warmup]
            what = number, stages - 1 - chunk
            run.begin_backward()
            order.append((INPUT, *what))
            queue.waiting.append(lambda what=what: order.append((WEIGHTS, *what)))
            assert len(queue) <= rank + 1
            if not late:
                run.finish()
    run.finish()
    return order


def seconds(orders: list[list[tuple[str, int, int]]], stages: int, late: bool) -> int:
    """End of the last rank; forward, gradient of input and gradients of weights of a chunk last 1 each. A backward that
    is whole sends its gradient when all of it is done.
    """
    ranks, done, place, clock = len(orders), {}, [0] * len(orders), [0] * len(orders)
    last = stages * ranks - 1
    while any(place[r] < len(orders[r]) for r in range(ranks)):
        before = sum(place)
        for r in range(ranks):
            while place[r] < len(orders[r]):
                kind, number, chunk = orders[r][place[r]]
                stage = chunk * ranks + r
                ready = INPUT if late else WEIGHTS
                needs = {FORWARD: (FORWARD, number, stage - 1), INPUT: (ready, number, stage + 1)}.get(kind)
                if kind == INPUT and stage == last:
                    needs = FORWARD, number, stage
                if needs is not None and needs[2] >= 0 and needs not in done:
                    break
                clock[r] = max(clock[r], done.get(needs, 0)) + 1
                done[kind, number, stage] = clock[r]
                place[r] += 1
        assert sum(place) > before, "ranks wait for each other"
    return max(clock)


@pytest.mark.parametrize("ranks, stages", [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_the_bubble_by_event_order(ranks, stages):
    """(p - 1)(F + D - W) of the time of a chunk, where the whole backward leaves (p - 1)(F + D + W)."""
    pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
    microbatches = 3 * ranks
    work = 3 * microbatches * stages
    for late, bubble in ((False, 3 * (ranks - 1)), (True, ranks - 1)):
        orders = [events(ranks, rank, stages, microbatches, late) for rank in range(ranks)]
        assert seconds(orders, stages, late) - work == bubble
