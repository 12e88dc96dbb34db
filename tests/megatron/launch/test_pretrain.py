"""Megatron-LM's pretrain_gpt.py, with one import line more, over gloo: losses and gradient norms of compiled chunks are
those of Megatron's own eager run, checkpoints resume bitwise, and collectives of buckets run beside the graphs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.megatron.launch import runner

SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --eval-iters 0
    --eval-interval 100 --log-interval 1 --log-throughput --attention-dropout 0 --hidden-dropout 0
    --make-vocab-size-divisible-by 1 --num-workers 0""".split()
EAGER = {"MINDSPEED_FX_COMPILE": "0"}
COMPILED = {"MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'}


def train(flags: str, world: int, environ: dict[str, str] = COMPILED, **kwargs: object) -> runner.Run:
    result = runner.run([*SMALL, *flags.split()], world, environ=environ, **kwargs)
    assert result.error is None, result.error
    return result


def check_equal(flags: str, world: int, graphs: int, tolerance: float = 1e-5) -> None:
    """The same losses and gradient norms, and ``graphs`` graphs on every rank."""
    eager, compiled = train(flags, world, EAGER), train(flags, world)
    assert compiled.graphs == [graphs] * world, compiled.breaks
    assert not any(eager.graphs)
    assert set(compiled.losses) == set(eager.losses) == {1, 2, 3}
    for iteration, losses in eager.losses.items():
        assert compiled.losses[iteration] == pytest.approx(losses, rel=tolerance)
        norm = eager.grad_norms.get(iteration)
        assert compiled.grad_norms.get(iteration) == (None if norm is None else pytest.approx(norm, rel=tolerance))


def test_a_pipeline_of_interleaved_stages():
    """Chunks with several micro-batches in flight, whose gradients one main_grad takes; two chunks of a rank are alike
    but for their buckets.
    """
    flags = """--pipeline-model-parallel-size 2 --num-layers 6 --num-layers-per-virtual-pipeline-stage 1
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion"""
    check_equal(flags, 2, graphs=3)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_and_sequence_parallel_with_the_distributed_optimizer_and_overlap(world):
    flags = """--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
        --overlap-param-gather --ddp-bucket-size 20000"""
    check_equal(flags, world, graphs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer --no-gradient-accumulation-fusion",
        "--overlap-grad-reduce --ddp-bucket-size 20000 --no-gradient-accumulation-fusion",
        "--optimizer sgd",
        "--ddp-num-buckets 3 --overlap-grad-reduce --accumulate-allreduce-grads-in-fp32",
        "--init-model-with-meta-device",
        "--normalization LayerNorm --use-distributed-optimizer",
    ],
)
def test_settings_in_float32(flags):
    check_equal(flags, 2, graphs=1)


@pytest.mark.slow
def test_flags_of_a_model_and_of_documents_reach_it():
    """Each changes the loss of the first iteration."""
    flags = ("", "--reset-attention-mask", "--reset-attention-mask --fix-sub-seq-length 4", "--scale-emb 3")
    losses = [train(f"--train-iters 1 --lr-decay-iters 3 {words}", 1).losses[1]["lm loss"] for words in flags]
    assert len(set(losses)) == len(flags), losses


@pytest.mark.parametrize("dtype", ["--bf16", pytest.param("--fp16 --initial-loss-scale 1024", marks=pytest.mark.slow)])
def test_sixteen_bits_with_float32_main_weights(dtype):
    """Within twice the eager run's own distance from float32."""
    flags = "--use-distributed-optimizer"
    exact = train(flags, 1, EAGER)
    eager, compiled = (train(f"{flags} {dtype}", 1, environ) for environ in (EAGER, COMPILED))
    for iteration in exact.losses:
        loss = exact.losses[iteration]["lm loss"]
        own = abs(eager.losses[iteration]["lm loss"] - loss)
        assert abs(compiled.losses[iteration]["lm loss"] - loss) <= 2 * own + 1e-5 * loss


@pytest.mark.slow
def test_torch_fsdp2_trains_as_the_replicated_model():
    """One graph for the chunk; Megatron asks for more connections than one."""
    flags = "--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion"
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    replicated = train("", 2, EAGER)
    for environ, graphs in ((EAGER, [0, 0]), (COMPILED, [1, 1])):
        divided = train(flags, 2, {**environ, **more})
        assert divided.graphs == graphs
        for k, losses in replicated.losses.items():
            assert divided.losses[k] == pytest.approx(losses, rel=1e-5)
            assert divided.grad_norms[k] == pytest.approx(replicated.grad_norms[k], rel=1e-5)


def record_collectives(rank: int) -> None:
    """Prints when a bucket's collective starts, when a backward begins and ends, and what a forward waits for."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group
    from megatron.core.pipeline_parallel import schedules

    start, finish, backward = Group.start_grad_sync, Group.finish_param_sync, schedules.backward_step

    def started(self, *args, **kwargs):
        print("event: reduce", flush=True)
        return start(self, *args, **kwargs)

    def finished(self, *args, **kwargs):
        print(f"event: {'wait' if self.param_gather_handle is not None else 'gather'}", flush=True)
        return finish(self, *args, **kwargs)

    def stepped(*args, **kwargs):
        print("event: begin", flush=True)
        result = backward(*args, **kwargs)
        print("event: end", flush=True)
        return result

    Group.start_grad_sync, Group.finish_param_sync, schedules.backward_step = started, finished, stepped


def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which says first that it runs."""

    def tell(*args, **kwargs):
        print(f"event: {name}", flush=True)
        return function(*args, **kwargs)

    return tell


def events(run: runner.Run) -> list[str]:
    return [line.removeprefix("event: ") for line in run.output[0].splitlines() if line.startswith("event: ")]


def test_collectives_of_buckets_start_inside_the_compiled_graphs():
    """All but the first step (whose gradients Megatron counts): every bucket is reduced before the last micro-batch's
    backward ends, and gathers of parameters are under way when the forward first needs them."""
    flags = """--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000
        --global-batch-size 8 --train-iters 2"""
    run = train(flags, 2, setup=f"{__name__}:record_collectives")
    assert run.graphs == [1, 1]
    names = events(run)
    final = names[len(names) - 1 - names[::-1].index("begin") :]
    buckets = names.count("reduce") // 2
    assert buckets >= 3
    assert final[0] == "begin" and final[-1] == "end" and final.count("reduce") == buckets
    assert names.count("gather") >= 1  # the first bucket's, by the forward that needs it
    assert names.count("wait") >= buckets - 1  # the others were under way


SLICED = "torch --disable-gloo-group --hccl-slice-size 1000"


@pytest.mark.parametrize(
    "form", ["torch_dist", *(pytest.param(form, marks=pytest.mark.slow) for form in ("torch", SLICED))]
)
def test_a_run_resumes_bitwise_from_a_checkpoint(tmp_path, form):
    flags = f"""--bf16 --use-distributed-optimizer --ckpt-format {form} --lr-decay-iters 4 --train-iters 4
        --global-batch-size 4 --num-layers 1"""
    whole = train(f"{flags} --save {tmp_path} --save-interval 2", 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "iter_0000004")
    rest = train(f"{flags} --load {tmp_path}", 2)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}
    assert rest.grad_norms == {k: whole.grad_norms[k] for k in (3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_norms_in_float32_are_saved_so_and_resume_bitwise(tmp_path, form):
    flags = f"""--bf16 --init-norm-weight-in-fp32 --use-distributed-optimizer --ckpt-format {form} --lr-decay-iters 4
        --train-iters 4 --global-batch-size 4"""
    whole = train(f"{flags} --save {tmp_path} --save-interval 2", 2)
    if form == "torch":
        saved = torch.load(tmp_path / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
        types = {n: t.dtype for n, t in saved.items() if isinstance(t, torch.Tensor)}
        norms = {n for n in types if "norm" in n}
        assert len(norms) == 5 and {types[n] for n in norms} == {torch.float32}
        assert {types[n] for n in types.keys() - norms} == {torch.bfloat16}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "iter_0000004")
    rest = train(f"{flags} --load {tmp_path}", 2)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}
    assert rest.grad_norms == {k: whole.grad_norms[k] for k in (3, 4)}


@pytest.mark.slow
def test_the_average_of_the_weights_is_saved_and_goes_on(tmp_path):
    """--optimizer-selection fused_ema_adamw on two ranks: the averaged model beside the model, its states bitwise."""
    flags = f"""--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ckpt-format torch
        --optimizer-selection fused_ema_adamw --ema-decay 0.5 --lr-decay-iters 4 --train-iters 4 --global-batch-size 4
        --save {tmp_path} --save-interval 2"""
    whole = train(flags, 2)

    def files():
        folder = tmp_path / "iter_0000004" / "mp_rank_00"
        return [torch.load(folder / name, weights_only=False) for name in ("model_optim_rng.pt", "distrib_optim.pt")]

    model, states = files()
    averages = {n: t for n, t in model["ema_model"].items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    assert averages and set(model["ema_model"]) == set(model["model"])
    assert sum(not torch.equal(t, model["model"][n]) for n, t in averages.items()) > len(averages) // 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "iter_0000004")
    rest = train(f"{flags} --load {tmp_path}", 2)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}
    again, states_again = files()
    assert all(torch.equal(t, again["ema_model"][n]) for n, t in averages.items())
    for buffer, by_dtype in states.items():
        for dtype, tensors in by_dtype.items() if isinstance(by_dtype, dict) else ():
            assert torch.equal(tensors["ema_params"], states_again[buffer][dtype]["ema_params"])


def kill(rank: int) -> None:
    """The victim dies in its second save, or in its fourth step."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import training

    victim, when = os.environ["VICTIM"].split()
    owner, name, last = (
        (FileSystemWriterAsync, "prepare_write_data", 2) if when == "save" else (training, "train_step", 4)
    )
    original, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == last and rank == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["save", "step"])
@pytest.mark.parametrize(
    "victim, sizes, world",
    [
        (0, "", 2),
        (1, "", 2),
        (3, "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --overlap-grad-reduce", 4),
    ],
)
def test_a_killed_rank_costs_nothing_before_the_last_whole_checkpoint(tmp_path, when, victim, sizes, world):
    flags = f"""--use-distributed-optimizer --ckpt-format torch_dist --lr-decay-iters 4 --train-iters 4
        --global-batch-size 4 {sizes}"""
    whole = train(flags, world)

    save = f"{flags} --save {tmp_path} --save-interval 2"
    broken = runner.run(
        [*SMALL, *save.split()], world, environ={**COMPILED, "VICTIM": f"{victim} {when}"}, setup=f"{__name__}:kill"
    )
    assert broken.error is not None
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    rest = train(f"{flags} --load {tmp_path}", world)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}


def test_chunks_stay_eager_on_request_and_another_word_is_refused(monkeypatch):
    from mindspeed_fx.megatron.training import compile_chunks

    monkeypatch.setenv(compile_chunks.SWITCH, "0")
    assert not compile_chunks.wants_compile()
    monkeypatch.setenv(compile_chunks.SWITCH, "yes")
    with pytest.raises(ValueError, match="MINDSPEED_FX_COMPILE='yes': expected 0 or 1"):
        compile_chunks.wants_compile()
