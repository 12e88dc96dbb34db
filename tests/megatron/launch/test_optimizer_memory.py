"""Megatron-LM's training with less of the optimizer in device memory: bitwise the runs without, over gloo."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

SHARDED = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
REUSE, SWAP = "--reuse-fp32-param", "--swap-optimizer --swap-optimizer-times 4"


def check_same(one: runner.Run, other: runner.Run) -> None:
    """The same losses and gradient norms, bit for bit."""
    assert one.losses == other.losses and one.grad_norms == other.grad_norms
    assert len({str(losses) for losses in one.losses.values()}) == len(one.losses) > 1


SETTINGS = [
    "--bf16",
    "--bf16 --optimizer sgd",
    "--use-distributed-optimizer",
    "--fp16 --initial-loss-scale 1024 --use-distributed-optimizer",
    f"{SHARDED} --tensor-model-parallel-size 2 --sequence-parallel",
    "--bf16 --use-distributed-optimizer --log-num-zeros-in-grad",
    """--bf16 --use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-ffn-hidden-size 32""",
]


def compare(flags: str, more: str, environ: dict[str, str]) -> None:
    plain, lean = (train(f"{flags} {words}", 2, environ) for words in ("", more))
    check_same(plain, lean)
    assert lean.graphs == plain.graphs
    assert any(f"mindspeed_fx: {more.split()[0]}: between steps" in line for line in lean.output[0].splitlines())


@pytest.mark.parametrize("more", [REUSE, SWAP])
def test_steps_are_bitwise_those_without(more):
    compare(SHARDED, more, EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("more", [REUSE, SWAP])
@pytest.mark.parametrize("flags", SETTINGS)
def test_settings(flags, more):
    if more == REUSE and "--bf16" not in flags:
        pytest.skip("nothing to share in float32, refused in float16")
    compare(flags, more, EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("more", [REUSE, SWAP])
def test_compiled_chunks(more):
    compare(SHARDED, more, COMPILED)


SAVES = "--bf16 --lr-decay-iters 4 --train-iters 4 --global-batch-size 4"


def stopped_and_taken_up(folder: Path, one: str, other: str) -> tuple[runner.Run, runner.Run]:
    """(Four steps with flags ``one``, the last two with ``other`` from the checkpoint between)."""
    whole = train(f"{SAVES} {one} --save {folder} --save-interval 2", 2, EAGER)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(folder / "iter_0000004")
    return whole, train(f"{SAVES} {other} --load {folder}", 2, EAGER)


def resume(folder: Path, flags: str, saves: str, loads: str) -> None:
    """Two steps more than a checkpoint of ``saves`` are the same with ``loads``."""
    whole, rest = stopped_and_taken_up(folder, f"{flags} {saves}", f"{flags} {loads}")
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}
    assert rest.grad_norms == {k: whole.grad_norms[k] for k in (3, 4)}


@pytest.mark.parametrize("more", [REUSE, pytest.param(SWAP, marks=pytest.mark.slow)])
def test_a_checkpoint_is_read_without_the_flag(tmp_path, more):
    resume(tmp_path, "--use-distributed-optimizer", more, "")


@pytest.mark.slow
@pytest.mark.parametrize("more", [REUSE, SWAP])
@pytest.mark.parametrize("writes", ["lean", "plain"])
@pytest.mark.parametrize(
    "form",
    [
        "--use-distributed-optimizer --ckpt-format torch",
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
        "--ckpt-format torch",
        "--ckpt-format torch_dist",
    ],
)
def test_forms_of_checkpoints(tmp_path, form, writes, more):
    resume(tmp_path, form, *((more, "") if writes == "lean" else ("", more)))


FORMS = ["torch", "torch_dist", "torch_dist --dist-ckpt-optim-fully-reshardable"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=["torch", "dist", "fully"])
@pytest.mark.parametrize("narrow", ["--o2-optimizer --o2-gradient", "--quant-states fp8", "--quant-states mxfp8"])
def test_narrow_moments_are_saved(tmp_path, form, narrow):
    flags = f"{narrow} --use-distributed-optimizer --no-gradient-accumulation-fusion"
    resume(tmp_path, f"{flags} --ckpt-format {form}", "", "")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=["torch", "dist", "fully"])
@pytest.mark.parametrize("writes", ["scaled", "plain"])
def test_moments_in_8_bits_are_read_without_the_flag_and_others_with_it(tmp_path, form, writes):
    plain = f"--use-distributed-optimizer --ckpt-format {form}"
    scaled = f"{plain} --quant-states fp8"
    whole, rest = stopped_and_taken_up(tmp_path, *((scaled, plain) if writes == "scaled" else (plain, scaled)))
    assert rest.losses[3] == whole.losses[3] and rest.grad_norms[3] == whole.grad_norms[3]
    assert rest.losses[4]["lm loss"] == pytest.approx(whole.losses[4]["lm loss"], rel=2e-3)
