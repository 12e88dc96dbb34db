"""Fake modes remember what our operators and collectives return, while a graph is compiled and no longer."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mindspeed_fx.ops  # noqa: F401  registers the operators
from mindspeed_fx.compat.fake import remembering_calls


def ask(f):
    """How often a call was not remembered when ``f`` was called again, and the results of all three calls."""
    unknown = lambda: FakeTensorMode.cache_info().bypasses.get("non-builtin", 0)
    with FakeTensorMode():
        results = [f(), f()]
        before = unknown()
        third = f()
        return unknown() - before, [*results, third]


def norm():
    return torch.ops.mindspeed.rms_norm(torch.empty(3, 8)[:, ::2], torch.empty(4), 1e-6, False)


@pytest.fixture(autouse=True)
def empty_cache():
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def test_what_an_operator_returns_is_known_the_second_time():
    assert ask(norm)[0] == 1
    FakeTensorMode.cache_clear()
    with remembering_calls():
        unknown, results = ask(norm)
    assert not unknown
    layouts = {tuple((t.shape, t.stride(), t.dtype) for t in result) for result in results}
    storages = {t.untyped_storage()._cdata for result in results for t in result}
    assert len(layouts) == 1 and len(storages) == 6


def test_afterwards_torch_decides_again():
    own = FakeTensorMode._validate_cache_key
    with remembering_calls():
        assert FakeTensorMode._validate_cache_key is not own
    assert FakeTensorMode._validate_cache_key is own


def test_what_a_group_decides_is_asked_for_each_time():
    from mindspeed_fx.compat.fake import _depends_on_arguments_alone

    mindspeed, c10d = torch.ops.mindspeed, torch.ops._c10d_functional
    assert _depends_on_arguments_alone(mindspeed.linear.default)
    assert _depends_on_arguments_alone(c10d.all_gather_into_tensor.default)
    for func in (mindspeed.mm_all_reduce_add_rms_norm.default, c10d.all_reduce_.default, torch.ops.aten.mm.default):
        assert not _depends_on_arguments_alone(func)
