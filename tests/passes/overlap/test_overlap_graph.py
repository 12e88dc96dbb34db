"""Every order that the task graph of an fx graph allows gives bitwise the same results."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.passes.overlap.model.simulator import simulate
from mindspeed_fx.passes.overlap.model.task_graph import saved_activation, tasks_of

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def trace(f, *inputs):
    return make_fx(f, tracing_mode="fake")(*inputs)


def any_order(work, dice):
    """A random topological order."""
    missing, users, order = [len(t.needs) for t in work.tasks.tasks], work.tasks.users, []
    ready = [i for i, m in enumerate(missing) if not m]
    while ready:
        i = ready.pop(dice.randrange(len(ready)))
        order.append(i)
        for u in users[i]:
            missing[u] -= 1
            if not missing[u]:
                ready.append(u)
    return order


def unit(node):
    return 1.0, "link"


def group():
    return dist.group.WORLD.group_name


def writes_in_place(x, w):
    a = x @ w
    view = a.view(-1)
    b = view * 2
    a.add_(1)
    c = view.sum() + b.sum()
    x.copy_(a)
    return c, a.relu()


def draws_numbers(x, w):
    first = torch.rand(4, 4)
    y = aten.native_dropout(x @ w, 0.5, True)[0]
    return first, y, torch.rand(4, 4) + x, aten.bernoulli.p(x, 0.5)


def communicates(x, w):
    g = x @ w
    started = functional.all_reduce.default(g, "sum", group())
    part, rest = torch.split(w, 2)
    gathered = functional.wait_tensor.default(
        functional.all_gather_into_tensor.default(part.contiguous() * 2, 1, group())
    )
    scattered = functional.wait_tensor.default(functional.reduce_scatter_tensor.default(rest + 1, "sum", 1, group()))
    return functional.wait_tensor.default(started) + 1, gathered @ w, scattered.sum()


def coalesced(x, w):
    started = functional.all_gather_into_tensor_coalesced.default([x, w * 2], 1, group())
    a, b = (functional.wait_tensor.default(s) for s in started)
    return a + 1, b @ x


def reduces_in_place(x, w):
    g = (x @ w).clone()
    before = g.sum()
    h = functional.wait_tensor.default(functional.all_reduce_.default(g, "sum", group()))
    h.mul_(2)
    return before, g + 1, (w @ w).sum()


@pytest.mark.parametrize("program", [writes_in_place, draws_numbers, communicates, coalesced, reduces_in_place])
def test_any_order_is_bitwise_the_same(program, lone_world):
    make = lambda: [torch.randn(4, 4, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    gm = trace(program, *make())
    torch.manual_seed(3)
    inputs = make()
    expected = [*gm(*inputs), *inputs]
    dice, seen = random.Random(0), set()
    for _ in range(40):
        work = tasks_of(gm, unit)
        work.apply(any_order(work, dice))
        gm.graph.lint()
        seen.add(tuple(n.name for n in gm.graph.nodes))
        torch.manual_seed(3)
        inputs = make()
        for a, b in zip([*gm(*inputs), *inputs], expected, strict=True):
            assert torch.equal(a, b)
    assert len(seen) > 5


def test_tasks_buffers_and_links(lone_world):
    gm = trace(communicates, torch.randn(4, 4), torch.randn(4, 4))
    work = tasks_of(gm, lambda node: (2.0, "wire") if "c10d" in str(node.target) else (1.0, ""))
    tasks = {t.name: t for t in work.tasks.tasks}
    assert {t.resource for t in tasks.values()} == {"compute", "wire"} and tasks["all_reduce"].kind == "all_reduce"
    assert (
        tasks["all_reduce"].group == group()
        and tasks["wait_tensor"].kind == "wait"
        and tasks["wait_tensor"].seconds == 0
    )
    assert tasks["split"].seconds == 0 and tasks["mm"].seconds == 1.0
    index = {t.name: i for i, t in enumerate(work.tasks.tasks)}
    product = next(b for b in work.tasks.buffers if b.made_by == index["mm"])
    waiting = next(i for n, i in index.items() if tasks[n].kind == "wait" and index["all_reduce"] in tasks[n].needs)
    assert (
        product.bytes == 64 and set(product.users) == {index["all_reduce"], waiting} and not product.kept
    )  # in use until the wait
    result = next(b for b in work.tasks.buffers if b.made_by == index["all_reduce"])
    assert waiting in result.users and not result.kept


def test_saved_activations_are_freed_and_parameters_are_not():
    def backward(primals_1, mm, tangents_1):
        return (mm * 2) @ tangents_1 @ primals_1

    gm = trace(backward, *(torch.randn(4, 4) for _ in range(3)))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("primals_1", "mm_7", "tangents_1")):
        node.name = name
    inputs = [b for b in tasks_of(gm, unit, owned=saved_activation).tasks.buffers if b.made_by < 0]
    assert [b.bytes for b in inputs] == [64, 64] and not any(b.kept for b in inputs)
    assert simulate(tasks_of(gm, unit, owned=saved_activation).tasks).memory[0] == 3 * 64
