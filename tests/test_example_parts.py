"""Parts of the main job in this process: every option of the backend is an argument, and what the text must be."""

import argparse
import dataclasses
import itertools
import os
import sys
import types
from pathlib import Path

import pytest

from mindspeed_fx.options import Options

EXAMPLES = str(Path(__file__).parents[1] / "examples")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import backend_options
    import corpus

    yield backend_options, corpus
    for name in ("backend_options", "corpus"):
        del sys.modules[name]


def parsed(backend_options, *arguments, backend="mindspeed"):
    parser = argparse.ArgumentParser()
    backend_options.add_arguments(parser)
    return backend_options.given(parser.parse_args(arguments), backend)


GIVEN = {
    "level": (["1"], 1),
    "enable": (["fusion.*", "overlap.bucket"], ["fusion.*", "overlap.bucket"]),
    "disable": (["fusion.rope"], ["fusion.rope"]),
    "target": (["npu"], "npu"),
    "hardware": (["ascend910b2"], "ascend910b2"),
    "memory_budget": (["24GiB"], "24GiB"),
    "recompute": (["selective"], "selective"),
    "offload": ([], True),
    "host_memory": (["64GiB"], "64GiB"),
    "host_bandwidth": (["50GB"], "50GB"),
    "certify": ([], True),
    "overlap_memory": (["512MiB"], "512MiB"),
    "data_parallel": (["world"], "world"),
    "optimizer": (["backward"], "backward"),
    "codegen": (["npugraph_ex"], "npugraph_ex"),
    "dump": (["3"], "3"),
    "check": (["each"], "each"),
    "strict": ([], True),
    "npugraph_ex": (['{"clone_input": false}'], {"clone_input": False}),
    "inductor": (['{"max_autotune": true}'], {"max_autotune": True}),
}


def test_every_option_is_an_argument(modules):
    assert not {f.name for f in dataclasses.fields(Options)} - set(GIVEN), "an option without a value to try it with"
    for name, (words, value) in GIVEN.items():
        more = {
            "npugraph_ex": ["--codegen", "npugraph_ex"],
            **dict.fromkeys(("offload", "host_memory", "host_bandwidth"), ["--memory-budget", "min", "--offload"]),
            "certify": ["--memory-budget", "min"],
        }.get(name, [])
        got = parsed(modules[0], f"--{name.replace('_', '-')}", *words, *more)
        assert got[name] == value and set(got) <= {name, *(w[2:].replace("-", "_") for w in more)}
        Options(**got)


@pytest.mark.parametrize(
    "words, value",
    [
        (("--memory-budget", "min"), "min"),
        (("--memory-budget", "0.5"), 0.5),
        (("--memory-budget", "25769803776"), 24 * 2**30),
        (("--recompute", '{"layers.*": "save"}'), {"layers.*": "save"}),
        (("--no-strict",), False),
        (("--overlap-memory", "1048576"), 2**20),
        (("--enable",), []),
    ],
)
def test_values_of_every_kind(modules, words, value):
    (got,) = parsed(modules[0], *words).values()
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "words, error",
    [
        (("--memory-budget", "24 apples"), "option \"memory_budget\" is '24 apples'"),
        (("--level", "7"), 'option "level" is 7; valid: 0, 1, 2'),
        (("--hardware", "h10"), "h10"),
        (("--inductor", '{"max_autotune": tru}'), 'option "inductor" takes a dict'),
        (("--inductor", '{"max_autotun": true}'), 'did you mean "max_autotune"'),
        (("--check", "eech"), 'did you mean "each"'),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_option(modules, words, error):
    with pytest.raises(SystemExit) as raised:
        parsed(modules[0], *words)
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_other_backends_take_no_options(modules):
    assert parsed(modules[0], backend="eager") == {}
    with pytest.raises(
        SystemExit, match="--memory-budget is an option of --backend mindspeed, not of --backend inductor"
    ):
        parsed(modules[0], "--memory-budget", "min", backend="inductor")


def test_texts(modules, tmp_path):
    Corpus = modules[1].Corpus
    with pytest.raises(OSError, match="there is no file /nonexistent"):
        Corpus(["/nonexistent"], str(tmp_path / "cache"))
    paths = [tmp_path / n for n in ("a.txt", "b.txt", "c.txt")]
    for path, words in zip(paths, ("one text. ", "one text. ", "one texT. "), strict=True):
        path.write_text(words * 1000)
    prints = [Corpus([str(p)], str(tmp_path / "cache")).fingerprint for p in paths]
    assert prints[0] == prints[1] != prints[2] and len(prints[0]) == 16
    again = Corpus([str(paths[0])], str(tmp_path / "cache"))
    assert again.fingerprint == prints[0]
    again.require(100)
    with pytest.raises(ValueError, match="validation has 500 tokens, fewer than a sequence of 512"):
        again.require(512)
    for done in (tmp_path / "cache").glob("*/done"):  # as an earlier version left it
        os.truncate(done, 0)
    assert Corpus([str(paths[0])], str(tmp_path / "cache")).fingerprint == prints[0]


def test_utilization_is_a_part_of_the_whole_or_unknown(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    import pretrain_gpt

    assert pretrain_gpt.utilization(3e9, 4e9) == "MFU 75%" and pretrain_gpt.utilization(4e9, 4e9) == "MFU 100%"
    assert pretrain_gpt.utilization(5e9, 4e9) == "MFU unknown, the model is faster than the peak"
    ticks = itertools.count()  # a busy machine: of a second, the processor was ours for a quarter
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)), process_time=lambda: 0.25 * next(ticks))
    monkeypatch.setattr(pretrain_gpt, "time", clock)
    monkeypatch.setattr(pretrain_gpt.torch, "get_num_threads", lambda: 1)
    assert pretrain_gpt.measured_tflops(sizes=(8, 64), times=2) == pytest.approx(2 * 64**3 / 0.25 / 1e12)
    for name in ("pretrain_gpt", "backend_options", "corpus"):
        sys.modules.pop(name, None)
