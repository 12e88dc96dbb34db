"""Parts of the main job in this process: every option of the backend is an argument, and what the text must be."""

import argparse
import dataclasses
import importlib
import itertools
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from mindspeed_fx.options import Options

EXAMPLES = str(Path(__file__).parents[1] / "examples")


@pytest.fixture
def backend_options(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import backend_options

    yield backend_options
    del sys.modules["backend_options"]


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
    "regather": ([], True),
    "count_flops": ([], True),
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


def test_every_option_is_an_argument(backend_options):
    assert not {f.name for f in dataclasses.fields(Options)} - set(GIVEN), "an option without a value to try it with"
    for name, (words, value) in GIVEN.items():
        more = {
            "npugraph_ex": ["--codegen", "npugraph_ex"],
            **dict.fromkeys(("offload", "host_memory", "host_bandwidth"), ["--memory-budget", "min", "--offload"]),
            "certify": ["--memory-budget", "min"],
        }.get(name, [])
        got = parsed(backend_options, f"--{name.replace('_', '-')}", *words, *more)
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
def test_values_of_every_kind(backend_options, words, value):
    (got,) = parsed(backend_options, *words).values()
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
def test_a_bad_value_is_one_line_that_names_the_option(backend_options, words, error):
    with pytest.raises(SystemExit) as raised:
        parsed(backend_options, *words)
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_other_backends_take_no_options(backend_options):
    assert parsed(backend_options, backend="eager") == {}
    with pytest.raises(
        SystemExit, match="--memory-budget is an option of --backend mindspeed, not of --backend inductor"
    ):
        parsed(backend_options, "--memory-budget", "min", backend="inductor")


def test_texts(monkeypatch, tmp_path):
    Corpus = import_example(monkeypatch, "corpus").Corpus
    with pytest.raises(OSError, match="there is no file /nonexistent"):
        Corpus(["/nonexistent"], str(tmp_path / "cache"))
    paths = [tmp_path / n for n in ("a.txt", "b.txt", "c.txt")]
    for path, words in zip(paths, ("one text. ", "one text. ", "one texT. "), strict=True):
        path.write_text(words * 1000)
    prints = [Corpus([str(p)], str(tmp_path / "cache")).fingerprint for p in paths]
    assert prints[0] == prints[1] != prints[2] and len(prints[0]) == 16
    again = Corpus([str(paths[0])], str(tmp_path / "cache"))
    assert again.fingerprint == prints[0] and again.tokens == {"train": 9500, "validation": 500}
    assert again.unigram_entropy() == pytest.approx(-(0.4 * math.log(0.1) + 0.6 * math.log(0.2)), rel=1e-3)
    again.require(100)
    with pytest.raises(ValueError, match="validation has 500 tokens, fewer than a sequence of 512"):
        again.require(512)
    for done in (tmp_path / "cache").glob("*/done"):  # as an earlier version left it
        os.truncate(done, 0)
    assert Corpus([str(paths[0])], str(tmp_path / "cache")).fingerprint == prints[0]


def test_one_block_of_text_in_twenty_is_held_out(monkeypatch, tmp_path):
    corpus = import_example(monkeypatch, "corpus")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    blocks = [bytes([i]) * corpus.BLOCK for i in range(40)] + [b"end"]
    (tmp_path / "text").write_bytes(b"".join(blocks))
    folder = corpus.Corpus([str(tmp_path / "text")], str(tmp_path / "cache")).folder
    train, validation = (IndexedDataset(str(folder / part)) for part in corpus.PARTS)
    assert [bytes(document) for document in validation] == [blocks[19], blocks[39]]
    assert [bytes(document) for document in train] == blocks[:19] + blocks[20:39] + blocks[40:]


def test_data_parallel_ranks_have_the_samples_of_a_step_between_them(monkeypatch):
    Batches = import_example(monkeypatch, "corpus").Batches
    one = list(Batches(26, 8, 2, 0, 1))
    two = [list(Batches(26, 8, 2, rank, 2)) for rank in range(2)]
    assert one[:2] == [[8, 9], [10, 11]] and one[-1] == [24, 25] and len(Batches(26, 8, 2, 0, 1)) == len(one)
    assert [batch for step in zip(*two) for batch in step] == one[:8] and two[0][4:] == [[24, 25]]


def import_example(monkeypatch, name):
    pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


def parse(monkeypatch, words, ranks=1):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    return import_example(monkeypatch, "gpt_arguments").parse(None, words.split())


@pytest.mark.parametrize(
    "words, ranks, error",
    [
        ("--tensor-model-parallel-size 2", 3, "3 processes cannot be divided by --tensor-model-parallel-size 2 x"),
        ("--context-parallel-size 2 --seq-length 30", 2, "--seq-length 30 cannot be divided in 4 chunks"),
        ("--pipeline-model-parallel-size 3", 3, "--num-layers 8 cannot be divided among 3 stages"),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "divides the stages of a pipeline, and there is one stage"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6",
            2,
            "needs a multiple of 2 micro-batches in a step, and --global-batch-size 6 gives 3",
        ),
        ("--sequence-parallel", 1, "--sequence-parallel divides what --tensor-model-parallel-size leaves whole"),
        ("--expert-model-parallel-size 2", 2, "--num-experts is not given"),
        ("--num-experts 3 --expert-model-parallel-size 2", 2, "--num-experts 3 cannot be divided"),
        ("--num-experts 4 --expert-model-parallel-size 4", 2, "cannot be divided by --expert-model-parallel-size 4"),
        ("--num-experts 4 --moe-router-topk 5", 1, "--moe-router-topk 5 is more than --num-experts 4"),
        ("--num-experts 4 --tensor-model-parallel-size 2", 2, "needs --sequence-parallel"),
        ("--global-batch-size 5", 1, "--global-batch-size 5 cannot be divided by --micro-batch-size 2 x 1"),
        (
            "--train-iters 40 --lr-warmup-iters 40",
            1,
            "--lr-warmup-iters 40 leaves nothing of --train-iters 40; give 0 to 39, or neither flag",
        ),
        ("--min-lr 1", 1, "--min-lr 1.0 is above --lr 0.0015"),
        ("--multi-latent-attention --num-query-groups 2", 1, "leave --num-query-groups away"),
        ("--overlap-param-gather --no-overlap-grad-reduce", 2, "--overlap-param-gather needs"),
        ("--overlap-grad-reduce --backend inductor", 2, "not of --backend inductor"),
        ("--num-attention-heads 10", 1, "--hidden-size 384 cannot be divided among --num-attention-heads 10"),
        ("--num-query-groups 4", 1, "--num-attention-heads 6 cannot be divided among --num-query-groups 4"),
        ("--micro-batch-size 0", 1, "--micro-batch-size 0 is less than 1"),
    ],
)
def test_what_does_not_go_together_is_one_line(monkeypatch, words, ranks, error):
    with pytest.raises(SystemExit) as raised:
        parse(monkeypatch, words, ranks)
    assert str(raised.value).startswith("error: ") and error in str(raised.value) and "\n" not in str(raised.value)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as raised:
        parse(monkeypatch, words, ranks)
    assert raised.value.code == 1, "another rank than the first says it again"


def test_defaults_that_depend_on_others(monkeypatch):
    alone, two = parse(monkeypatch, ""), parse(monkeypatch, "", 2)
    assert not (alone.bf16 or alone.overlap_grad_reduce or alone.overlap_param_gather)
    assert two.overlap_grad_reduce and two.overlap_param_gather and two.use_distributed_optimizer
    assert not parse(monkeypatch, "--no-use-distributed-optimizer", 2).overlap_param_gather
    assert not parse(monkeypatch, "--backend inductor", 2).overlap_grad_reduce
    assert [parse(monkeypatch, f"--train-iters {n}").lr_warmup_iters for n in (1, 10, 400)] == [0, 1, 40]
    assert (alone.num_query_groups, parse(monkeypatch, "--multi-latent-attention").num_query_groups) == (2, 6)
    assert parse(monkeypatch, "--context-parallel-size 2 --tensor-model-parallel-size 2", 8).data_parallel_size == 2


@pytest.fixture
def adaptor():
    """The adaptor for this test alone."""
    pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
    import mindspeed_fx.megatron

    mindspeed_fx.megatron.apply()
    yield
    from megatron.core import num_microbatches_calculator, parallel_state

    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    mindspeed_fx.megatron.undo()


SIZES = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 64"


@pytest.mark.parametrize(
    "words",
    [
        "--num-query-groups 2",
        "--num-query-groups 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16",
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --v-head-dim 20",
    ],
)
def test_flops_of_a_token_are_those_that_torch_counts(monkeypatch, adaptor, words):
    """But for the half of the scores that a causal mask hides."""
    args = parse(monkeypatch, f"{SIZES} {words} --no-gradient-accumulation-fusion")
    report, model = (import_example(monkeypatch, name) for name in ("gpt_report", "gpt_model"))
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from torch.utils.flop_counter import FlopCounterMode

    get_moe_layer_wise_logging_tracker().clear()  # of models of other tests, with fewer layers
    model.start_processes(args)
    chunk = model.build_chunk(args, model.build_config(args), None)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        chunk(tokens, torch.arange(64)[None], None, labels=tokens).sum().backward()
    keys = args.qk_head_dim + args.qk_pos_emb_head_dim if args.multi_latent_attention else 8
    values = args.v_head_dim if args.multi_latent_attention else 8
    hidden_half = 3 * 3 * 4 * (keys + values) * 64
    assert counter.get_total_flops() == 64 * (report.flops_per_token(args, 256) + hidden_half)


def test_utilization_is_a_part_of_the_whole_or_unknown(monkeypatch):
    report = import_example(monkeypatch, "gpt_report")
    assert report.utilization(3e9, 4e9) == "MFU 75%" and report.utilization(4e9, 4e9) == "MFU 100%"
    assert report.utilization(5e9, 4e9) == "MFU unknown, the model is faster than the peak"
    ticks = itertools.count()  # a busy machine: of a second, the processor was ours for a quarter
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)), process_time=lambda: 0.25 * next(ticks))
    monkeypatch.setattr(report, "time", clock)
    monkeypatch.setattr(report.torch, "get_num_threads", lambda: 1)
    assert report.measured_tflops(sizes=(8, 64), times=2) == pytest.approx(2 * 64**3 / 0.25 / 1e12)


def test_the_peak_is_the_best_that_was_measured_during_the_run(monkeypatch):
    report = import_example(monkeypatch, "gpt_report")
    measured = iter((0.5, 2.0, 1.0))
    monkeypatch.setattr(report, "measured_tflops", lambda dtype, device: next(measured))
    args = parse(monkeypatch, "--global-batch-size 4")
    throughput = report.Throughput(args, 256, torch.bfloat16, torch.device("cpu"))
    peaks = [throughput.peak]
    for _ in range(2):
        throughput.measure_peak()
        peaks.append(throughput.peak)
    assert peaks == [0.5, 2.0, 2.0]
    for seconds in (9.0, 1.0, 2.0, 3.0):
        throughput.add(seconds)
    part = 1024 / 2 * report.flops_per_token(args, 256) / 2e12
    assert throughput.describe_all() == (
        f"first step (with compilation) 9.0 s, median step 2000 ms, 512 tokens/s, MFU {part:.0%} of 2.00 TFLOP/s per "
        "rank (bfloat16, the best product measured)"
    )
