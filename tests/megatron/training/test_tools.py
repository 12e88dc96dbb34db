"""MindSpeed's tools in Megatron-LM's own loop."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace

import pytest

from mindspeed_fx.megatron.training.throughput import Meter
from mindspeed_fx.training.tensor_dump import compare_dumps
from tests.megatron.launch.test_pretrain import COMPILED, train


@pytest.mark.slow
def test_a_deterministic_run_has_the_same_bits_twice():
    """Dropout and the order of sums included; passes that promise no order say so."""
    flags = "--npu-deterministic --train-iters 2 --hidden-dropout 0.1 --overlap-grad-reduce --ddp-bucket-size 20000"
    first, second = (train(flags, 2) for _ in range(2))
    assert first.losses and (first.losses, first.grad_norms) == (second.losses, second.grad_norms)
    assert "LCCL_DETERMINISTIC" in first.output[0]


B, S, H, HEADS, FFN, V, LAYERS = 2, 32, 64, 4, 128, 128, 2
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def model_flops(samples: int) -> int:
    """Of one iteration of test_pretrain's model, forward and backward."""
    return 3 * (LAYERS * layer_flops(samples) + 2 * samples * S * H * V)


def layer_flops(samples: int) -> int:
    return 2 * samples * S * (4 * H * H + 3 * H * FFN) + 2 * 2 * samples * S * S * H


def flops(run, rank: int) -> dict[int, list[int]]:
    """Iteration -> FLOP in the lines of a rank: model and hardware, each of the rank and of all."""
    lines = [line for line in run.output[rank].splitlines() if line.startswith("mindspeed_fx: iteration")]
    assert all(
        "no MFU: the table of a cpu is no peak of this one; --mindspeed-peak-tflops gives it" in x for x in lines
    )
    return {int(x.split()[2]): [int(n) for n in re.findall("([0-9]+) (?:this rank|all)", x)] for x in lines}


SCORES_AGAIN = LAYERS * 2 * 8 * S * S * H
"""Of 8 samples."""


def check_flops(run, is_full: bool) -> None:
    numbers = flops(run, 1)
    assert set(numbers) == {1, 2, 3} and numbers[1] == numbers[2] == numbers[3]
    own, everyone, own_hardware, all_hardware = numbers[1]
    expected = model_flops(8)
    assert everyone == expected and own == expected // 2
    assert own_hardware == all_hardware // 2
    # all but the first layer's last product, whose result is saved for the second
    recomputed = LAYERS * layer_flops(8) - 2 * 8 * S * H * FFN if is_full else 0
    assert all_hardware == everyone + SCORES_AGAIN + recomputed


def test_a_resumed_run_divides_by_its_own_iterations(capsys):
    args = Namespace(iteration=100, log_interval=2, rank=0, world_size=1, mindspeed_peak_tflops=1.0)
    meter = Meter(args, eager=False)
    meter.count.model = 1000
    for iteration in (101, 102):
        meter.after(iteration)
    assert "iteration 102 | model FLOP: 500 this rank" in capsys.readouterr().out


def test_tensor_parallel_ranks_count_a_closed_form_and_one_is_profiled(tmp_path):
    profile = f"--profile --profile-step-start 2 --profile-step-end 3 --profile-ranks 1 --profile-save-path {tmp_path}"
    run = train(f"--op-cal-tflops --tensor-model-parallel-size 2 {profile} --profile-record-shapes", 2)
    check_flops(run, is_full=False)
    assert f"torch.profiler: iterations 2 to 2, a trace for each rank in {tmp_path}" in run.output[0]
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rank1.")
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    layers = 2 * 4  # of four micro-batches; two norms a layer and the last
    assert names.count("mindspeed::swiglu") == layers and names.count("mindspeed::swiglu_backward") == layers
    assert sum(n in ("mindspeed::rms_norm", "mindspeed::add_rms_norm") for n in names) == 2 * layers + 4


@pytest.mark.slow
def test_full_recomputation_is_the_hardwares_alone():
    check_flops(train(f"--op-cal-tflops --tensor-model-parallel-size 2 {FULL}", 2), is_full=True)


@pytest.mark.slow
def test_dumps_of_an_eager_run_hold_the_boundaries_of_compiled_chunks(tmp_path):
    for folder, modules in (("eager", "*"), ("compiled", "")):
        environ = {
            **COMPILED,
            "MINDSPEED_FX_DUMP_TENSORS": str(tmp_path / folder),
            "MINDSPEED_FX_DUMP_MODULES": modules,
        }
        run = train("--npu-datadump --train-iters 1 --lr-decay-iters 4 --global-batch-size 2", 1, environ)
        assert run.graphs == [int(not modules)]
    rows = [d for d in compare_dumps(tmp_path / "eager", tmp_path / "compiled", rtol=1e-4) if not d.note]
    assert [d.name for d in rows] == [f"rank0 chunk0. {k}, call 0, output 0" for k in ("forward", "gradient")]
    assert not any(d.is_beyond for d in rows)
    shutil.copytree(tmp_path / "eager", tmp_path / "again")
    modules = {d.name.split()[1] for d in compare_dumps(tmp_path / "eager", tmp_path / "again")}
    assert "chunk0.decoder.layers.1.mlp.linear_fc2" in modules
