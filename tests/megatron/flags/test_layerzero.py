"""``--layerzero``: what is read of its file, and a run whose weights are gathered layer by layer."""

from __future__ import annotations

import pytest

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import layerzero
from mindspeed_fx.megatron.flags import FlagError, apply
from mindspeed_fx.megatron.fsdp2_config import Settings
from tests.megatron.flags.words import parse
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"


def write(path, text: str) -> str:
    file = path / "layerzero.yaml"
    file.write_text(text)
    return str(file)


def run_of(path, text: str, more: str = ""):
    words = f"--layerzero --layerzero-config {write(path, text)} --untie-embeddings-and-output-weights {more}".split()
    args = parse(words)
    apply(args, words)
    return args


def test_a_file_of_all_settings(tmp_path):
    text = f"zero3_size: 4\ntransformer_layers: [{LAYER}]\nparam_dtype: bf16\nreduce_dtype: fp32\nautocast_input: false"
    expected = Settings(4, (LAYER,), True, "bf16", "fp32", cast_forward_inputs=False, num_to_forward_prefetch=1)
    assert layerzero.read(write(tmp_path, text)) == expected
    defaults = layerzero.read(write(tmp_path, "forward_prefetch: false"))
    assert (defaults.sharding_size, defaults.param_dtype, defaults.reduce_dtype) == (8, "fp16", "fp16")
    args = run_of(tmp_path, text, "--use-distributed-optimizer")
    assert args.use_torch_fsdp2 and not args.use_distributed_optimizer and not args.gradient_accumulation_fusion
    assert args.ckpt_format == "torch_dist" and args.mindspeed_layerzero["sharding_size"] == min(
        4, getattr(args, "world_size", 1)
    )


@pytest.mark.parametrize(
    "text, word",
    [
        ("zero3_sise: 4", 'did you mean "zero3_size"'),
        ("zero3_size: 0", "zero3_size is 0; expected a whole number from 1"),
        ("param_dtype: int8", "param_dtype is 'int8'"),
        ("ignored_modules: [vae]", "ignored_modules is ['vae']: every weight is divided"),
        ("offload_grads: true", "gradients stay on the device"),
        ("ckpt_load_path: /some", "give --load"),
        ("[1]", "holds [1]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, word):
    with pytest.raises(OptionError) as error:
        layerzero.read(write(tmp_path, text))
    assert word in str(error.value)


@pytest.mark.parametrize(
    "more, word",
    [
        ("--fp16", "give --bf16"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size above 1"),
        ("--reuse-fp32-param --bf16", "--reuse-fp32-param beside it"),
    ],
)
def test_what_does_not_go_with_it(tmp_path, more, word):
    with pytest.raises(FlagError, match="--layerzero") as error:
        run_of(tmp_path, "zero3_size: 2", more)
    assert word in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("size, world", [(2, 2), (2, 4)])
def test_a_run_is_the_replicated_run(tmp_path, size, world):
    text = f"zero3_size: {size}\ntransformer_layers: [{LAYER}]\nparam_dtype: fp32\nreduce_dtype: fp32"
    flags = f"--layerzero --layerzero-config {write(tmp_path, text)} --use-distributed-optimizer"
    replicated = train("", world, EAGER)
    for environ, count in ((EAGER, 0), (COMPILED, 1)):
        divided = train(flags, world, environ)
        assert divided.graphs == [count] * world
        for k, losses in replicated.losses.items():
            assert divided.losses[k] == pytest.approx(losses, rel=1e-5)
            assert divided.grad_norms[k] == pytest.approx(replicated.grad_norms[k], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["", "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"])
def test_stages_of_a_pipeline(tmp_path, stages):
    """Two stages whose weights two ranks share, in both of Megatron's schedules; a checkpoint goes on bitwise."""
    text = f"zero3_size: 2\ntransformer_layers: [{LAYER}]\nparam_dtype: fp32\nreduce_dtype: fp32"
    words = f"--pipeline-model-parallel-size 2 {stages} --lr-decay-iters 4 --train-iters 4"
    flags = f"{words} --layerzero --layerzero-config {write(tmp_path, text)}"
    replicated, chunks = train(words, 4, EAGER), 2 if stages else 1
    for environ, count in ((EAGER, 0), (COMPILED, chunks)):
        folder = tmp_path / str(count)
        divided = train(f"{flags} --save {folder} --save-interval 2", 4, environ)
        assert divided.graphs == [count] * 4
        for k, losses in replicated.losses.items():
            assert divided.losses[k] == pytest.approx(losses, rel=1e-5)
            assert divided.grad_norms[k] == pytest.approx(replicated.grad_norms[k], rel=1e-5)
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        rest = train(f"{flags} --load {folder}", 4, environ)
        assert rest.losses == {k: divided.losses[k] for k in (3, 4)}
