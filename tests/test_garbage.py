"""The garbage collector while graphs are made: it does not look at them, and finds afterwards what they left."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mindspeed_fx import garbage
from mindspeed_fx.garbage import without_collection


class Circle:
    """Garbage that only the collector frees."""

    def __init__(self):
        self.me = self


@pytest.fixture
def collections():
    """Generations that were collected, in order."""
    seen = []
    note = lambda phase, info: seen.append(info["generation"]) if phase == "start" else None
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.fixture
def unfrozen(monkeypatch):
    monkeypatch.setattr(garbage, "_has_frozen", False)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_what_was_made_meanwhile_is_old_and_is_freed_by_a_full_collection(collections, unfrozen):
    with without_collection():
        kept = [[] for _ in range(10_000)]
        left = weakref.ref(Circle())
    young = gc.get_objects(generation=0)
    assert collections == [] and not any(o is kept[0] for o in young)
    gc.collect(1)
    assert left() is not None
    gc.collect()
    assert left() is None and gc.isenabled()


def test_frozen_objects_stay_frozen(unfrozen):
    frozen = [[]]
    gc.freeze()
    with without_collection():
        pass
    assert gc.get_freeze_count() > 0 and not any(o is frozen for o in gc.get_objects())


def test_frozen_objects_are_counted_once(unfrozen, monkeypatch):
    counts, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    with without_collection():
        pass
    gc.freeze()
    for _ in range(3):
        with without_collection():
            pass
    assert len(counts) == 2 and counts[0] == 0 < counts[1]


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_off_while_dynamo_reads_for_this_backend_alone():
    seen = []

    @torch.compiler.assume_constant_result
    def look():
        seen.append(gc.isenabled())
        return 1.0

    torch._dynamo.reset()  # which forgets what was registered; the next graph says it again
    x = torch.ones(2)
    for backend, options, step in (
        ("mindspeed", {"codegen": "eager"}, lambda x: x + look()),
        ("mindspeed", {"codegen": "eager"}, lambda x: x - look()),
        ("eager", None, lambda x: x * look()),
    ):
        torch.compile(step, backend=backend, options=options, fullgraph=True)(x)
        assert gc.isenabled()
    assert seen[1:] == [False, True]
