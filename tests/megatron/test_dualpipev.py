"""DualPipeV for Megatron's chunks without processes: what each rank runs and sends, and the bubble by event order."""

from __future__ import annotations

import itertools

import pytest

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron.dualpipev import messages
from mindspeed_fx.megatron.dualpipev.schedule import forwards_of, order_of
from tests.passes.recompute.test_pipelining import bubbles


def orders(count, microbatches, late):
    return [order_of(count, rank, microbatches, late) for rank in range(count)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count, microbatches", [(2, 4), (4, 8), (4, 11)])
def test_every_pass_runs_once_where_its_chunk_lies(count, microbatches, late):
    for rank, order in enumerate(orders(count, microbatches, late)):
        calls = [call for both in order for call in both]
        assert len(calls) == len(set(calls))
        stages = {rank, 2 * count - 1 - rank}
        wanted = {(stage, n) for stage in stages for n in range(microbatches)}
        assert {call[1:] for call in calls if call[0] == "F"} == wanted
        assert {call[1:] for call in calls if call[0] in "BI"} == wanted
        late_ones = {call[1:] for call in calls if call[0] == "W"}
        assert late_ones == {call[1:] for call in calls if call[0] == "I"} and bool(late_ones) == late
        for stage in stages:  # sums over micro-batches in their order
            numbers = [call[2] for call in calls if call[0] in "BW" and call[1] == stage]
            assert numbers == list(range(microbatches))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_sent_is_what_is_received(late):
    count = 4
    everybody = orders(count, 9, late)
    for rank, order in enumerate(everybody):
        mail = messages.Mail(everybody, rank, range(count), (None, None), lambda: None)
        coming = {m for source in mail.expected.values() for m in source}
        assert set(mail.expected) == {r for r in (rank - 1, rank + 1) if 0 <= r < count}
        calls = [call for both in order for call in both if call[0] != "W"]
        needs = {messages.Message("F" if kind == "F" else "B", stage, n) for kind, stage, n in calls}
        own = {messages.message_of(call, count) for call in calls}
        assert coming == {m for m in needs - own if m.stage or m.kind == "B"} - {
            m for m in needs if m.kind == "B" and m.stage == 2 * count - 1
        }
    down = messages.sent(everybody[0], 0, 1, count)
    assert {m.kind for m in down} == {"F", "B"}  # of first chunks forwards, of second ones gradients
    assert all(m.stage == (1 if m.kind == "F" else 2 * count - 2) for m in down)


def test_too_few_micro_batches_are_refused():
    with pytest.raises(OptionError, match="7 micro-batches a rank; 8, two for each .* larger --global-batch-size"):
        order_of(4, 0, 7, late=False)


@pytest.mark.parametrize("forward, inputs, weights", [(1, 1, 1), (2, 2, 1), (4, 4, 3)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_bubble(count, forward, inputs, weights):
    """With late gradients of weights DeepSeek's (p - 1)(F&B + B - 3 W), with F&B = F + B; without them more, and less
    than 1F1B's of two chunks a rank."""
    both = inputs + weights
    durations = {"F": forward, "I": inputs, "W": weights, "B": both}
    for microbatches, late in itertools.product((2 * count, 3 * count), (False, True)):
        waits = bubbles(orders(count, microbatches, late), durations)
        closed = (count - 1) * (forward + both + both - 3 * weights)
        if late:
            assert max(waits) == closed, waits
        else:
            assert closed < max(waits) < (count - 1) * 2 * (forward + both), waits


@pytest.mark.parametrize("count", [2, 4])
def test_forwards_alone_are_a_pipeline(count):
    """A rank waits for the ranks before it alone."""
    waits = bubbles([forwards_of(count, rank, 6) for rank in range(count)], {"F": 1})
    assert max(waits) <= 2 * count - 1, waits
