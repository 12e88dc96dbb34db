"""An order that needs little memory: by the rule, found fast."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.passes.overlap.scheduler.min_memory_order import min_memory_order
from tests.passes.overlap.random_tasks import random_tasks


def by_the_rule(graph):
    """The same order by looking at every ready task in every step."""
    order, done = [], set()
    while len(order) < len(graph):
        ready = [i for i in range(len(graph)) if i not in done and all(n in done for n in graph.tasks[i].needs)]

        def adds(i):
            made = sum(b.bytes for b in graph.buffers if b.made_by == i)
            return made - sum(
                b.bytes for b in graph.buffers if not b.kept and {b.made_by, *b.users} - {-1} - done == {i}
            )

        order.append(min(ready, key=lambda i: (max(adds(i), 0), i)))
        done.add(order[-1])
    return order


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_the_order_follows_the_rule(seed, size):
    graph = random_tasks(seed, size)
    assert min_memory_order(graph) == by_the_rule(graph)
