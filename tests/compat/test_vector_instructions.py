from __future__ import annotations

import platform
import threading

import pytest
import torch
from torch._inductor import cpu_vec_isa

from mindspeed_fx.backend import mindspeed
from mindspeed_fx.compat import dynamo, vector_instructions
from mindspeed_fx.reading import beside_reading

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="others have one set of instructions")


class Instructions:
    def __init__(self, is_valid):
        self.is_valid, self.asked = is_valid, 0

    def __bool__(self):
        self.asked += 1
        return self.is_valid


def test_what_is_taken_is_what_inductor_takes():
    vector_instructions.try_the_best()
    lazy = cpu_vec_isa.valid_vec_isa_list()
    every = cpu_vec_isa.valid_vec_isa_list.__wrapped__()
    assert isinstance(lazy, vector_instructions._Valid) and isinstance(every, list)
    assert bool(lazy) == bool(every) and len(lazy) == len(every)
    assert [i.build_arch_flags() for i in lazy] == [i.build_arch_flags() for i in every]
    assert cpu_vec_isa.pick_vec_isa() is (every[0] if every else cpu_vec_isa.invalid_vec_isa)


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_less_may_be_asked_for(capability, monkeypatch):
    vector_instructions.try_the_best()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    expected = {"avx2": "avx2", "default": "INVALID_VEC_ISA"}[capability]
    assert str(cpu_vec_isa.pick_vec_isa()) == expected


def test_no_more_is_tried_than_is_asked_for():
    tried = [Instructions(False), Instructions(True), Instructions(True)]
    valid = vector_instructions._Valid(tried)
    assert bool(valid) and valid[0] is tried[1] and [i.asked for i in tried] == [2, 2, 0]
    assert list(valid) == tried[1:] and valid[-1] is tried[2] and len(valid) == 2
    assert not vector_instructions._Valid(tried[:1])


def test_who_asks_meanwhile_waits(monkeypatch):
    begun, goes_on, answers = threading.Event(), threading.Event(), []

    class Slow(Instructions):
        def __bool__(self):
            begun.set()
            goes_on.wait(60)
            answers.append(threading.current_thread().name)
            return True

    slow = Slow(True)
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: vector_instructions._Valid([slow])[0])
    with vector_instructions.asked_early():
        begun.wait(60)
        other = threading.Thread(target=cpu_vec_isa.pick_vec_isa, name="other")
        other.start()
        other.join(0.05)
        assert other.is_alive() and not answers
        goes_on.set()
        other.join(60)
    assert answers == ["mindspeed_fx_vectors", "other"]


def test_an_error_is_left_to_who_asks(monkeypatch):
    def pick():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", pick)
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with vector_instructions.asked_early():
        pass
    assert not failed


@pytest.fixture
def asked(monkeypatch):
    threads = []
    monkeypatch.setattr(vector_instructions, "_find_out", lambda: threads.append(threading.current_thread().name))
    return threads


CPU, META = torch.ones(2), torch.ones(2, device="meta")


@pytest.mark.parametrize(
    "options, names, is_asked",
    [
        (None, {"x": CPU}, True),
        ({"level": 1}, {"model": torch.nn.Linear(2, 2)}, True),
        (None, {"model": torch.nn.Linear(2, 2, device="meta")}, False),
        (None, {"model": torch.nn.Linear(2, 2, device="meta"), "x": CPU}, False),
        (None, {"model": torch.nn.SiLU(), "x": CPU}, True),
        (None, {"x": META, "n": 3, "model": torch.nn.SiLU()}, False),
        ({"codegen": "eager"}, {"x": CPU}, False),
        ({"inductor": {"cpp.simdlen": 256}}, {"x": CPU}, False),
        ({"inductor": {"max_autotune": False}}, {"x": CPU}, True),
        ({"codegen": "nothing"}, {"x": CPU}, False),
    ],
)
def test_inductor_is_asked_for_a_cpu(options, names, is_asked, asked):
    with beside_reading(options, names):
        pass
    assert asked == ["mindspeed_fx_vectors"] * is_asked


@pytest.mark.parametrize("codegen, count", [("inductor", 1), ("eager", 0)])
def test_it_is_asked_while_dynamo_reads(codegen, count, asked):
    torch._dynamo.reset()  # forgets what is done then
    dynamo.while_compiling(mindspeed, beside_reading)
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(lambda x: model(x), backend="mindspeed", options={"codegen": codegen})
    compiled(CPU)
    assert len(asked) == count
