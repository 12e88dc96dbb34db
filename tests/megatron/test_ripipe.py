"""Chunks that are recomputed before their gradient arrives: gradients, and how many are kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_fx.cost.pipeline import Parts, play_stages
from mindspeed_fx.megatron import ripipe


@pytest.mark.parametrize("is_early", [True, False])
def test_gradients_and_dropout_of_a_chunk(is_early):
    torch.manual_seed(0)
    layer, x = (
        torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 5)),
        torch.randn(3, 5),
    )
    results = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        layer.zero_grad()
        source = x.clone().requires_grad_()
        decoder = SimpleNamespace(input_tensor=source)
        run = ripipe.Run([0], 1, None, [recomputed])
        out = run.forward(0, lambda: layer(decoder.input_tensor), decoder)
        after = torch.rand(1)  # recomputation leaves the generator as it was
        decoder.input_tensor = "of the next micro-batch"
        if is_early:
            run.begin_wait()
        assert decoder.input_tensor == "of the next micro-batch"
        out.square().sum().backward()
        run.end_backward()
        results.append([out.detach(), source.grad, *(p.grad.clone() for p in layer.parameters()), after, torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*results))


def interleaved(ranks: int, rank: int, stages: int, microbatches: int, limit: int | None) -> tuple[ripipe.Run, int]:
    """Forwards and backwards of a rank in Megatron's order; how many chunks were recomputed."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = [chunk for _, chunk in get_schedule_table(microbatches, stages, ranks)]
    last = [rank == ranks - 1 and chunk == stages - 1 for chunk in range(stages)]
    run = ripipe.Run([stages - 1 - chunk for chunk in table], stages, limit, [not is_last for is_last in last])
    decoder, again = SimpleNamespace(input_tensor=torch.zeros(1, requires_grad=True)), 0
    warmup = min(2 * (ranks - rank - 1) + (stages - 1) * ranks, len(table))
    for k in range(len(table) + warmup):
        if k < len(table):
            run.forward(table[k], lambda: torch.zeros(1), decoder)
        if k >= warmup:
            again += run.next_pass() is not None
            run.end_backward()
    assert run.done == len(table) and not any(run.passes)
    return run, again


@pytest.mark.parametrize("ranks, stages", [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_what_is_kept_at_once(ranks, stages):
    microbatches = 3 * ranks
    for rank in range(ranks):
        plain, _ = interleaved(ranks, rank, stages, microbatches, 10**9)
        assert plain.most == 2 * (ranks - rank - 1) + (stages - 1) * ranks + 1
        bubble, again = interleaved(ranks, rank, stages, microbatches, ranks * stages)
        assert bubble.most == min(plain.most, ranks * stages)
        assert (again > 0) == (plain.most > ranks * stages) == (ranks - 1 - 2 * rank > 0)
        advance, again = interleaved(ranks, rank, stages, microbatches, None)
        is_last = rank == ranks - 1
        assert again == (stages - is_last) * microbatches


def orders(ranks, stages, microbatches, ahead):
    """Groups of actions of every rank in Megatron's order, for :func:`mindspeed_fx.cost.pipeline.play_stages`: a chunk
    runs again before its gradient is waited for ("R", then "I"), or within its backward ("B")."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    of_ranks = []
    for rank in range(ranks):
        table = get_schedule_table(microbatches, stages, ranks)
        backwards = [(stages - 1 - chunk, number) for number, chunk in table]
        run = ripipe.Run([chunk for chunk, _ in backwards], stages, None, [True] * stages)
        decoder, order = SimpleNamespace(input_tensor=torch.zeros(1, requires_grad=True)), []
        warmup = min(2 * (ranks - rank - 1) + (stages - 1) * ranks, len(table))
        for k in range(len(table) + warmup):
            if k < len(table):
                number, chunk = table[k]
                run.forward(chunk, lambda: torch.zeros(1), decoder)
                order.append((("F", chunk * ranks + rank, number),))
            if k >= warmup:
                chunk, number = backwards[run.done]
                stage = chunk * ranks + rank
                if ahead and run.next_pass() is not None:
                    order.append((("R", stage, number),))
                order.append((("I" if ahead else "B", stage, number),))
                run.end_backward()
        of_ranks.append(order)
    return of_ranks


def bubble(ranks, stages, microbatches, forward, backward, ahead):
    """Time that the step lasts beyond a rank's work; a recomputation lasts as long as a forward."""
    parts = [Parts(forward, forward, backward, 0)] * (ranks * stages)
    played = play_stages(orders(ranks, stages, microbatches, ahead), parts)
    return played.seconds - microbatches * stages * (2 * forward + backward)


@pytest.mark.parametrize("forward, backward", [(1, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("ranks, stages", [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_the_bubble_by_event_order(ranks, stages, forward, backward):
    """(p - 1)(F + R + B) in the backward, (p - 1)(F + B) before the gradient arrives."""
    within = bubble(ranks, stages, 2 * ranks, forward, backward, False)
    assert within == (ranks - 1) * (2 * forward + backward)
    assert bubble(ranks, stages, 2 * ranks, forward, backward, True) == (ranks - 1) * (forward + backward)
