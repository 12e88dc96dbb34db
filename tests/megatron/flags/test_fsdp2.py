"""``--fsdp2-config-path``: what is read of the file, what torch's FSDP2 is told, and runs that are divided by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import fsdp2_config
from tests import ranks
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
MLP = "megatron.core.transformer.mlp.MLP"


def write(path, text: str) -> str:
    file = path / "fsdp2.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_of_all_settings(tmp_path):
    text = f"""
        sharding_size: 2
        sub_modules_to_wrap: [{LAYER}]
        reshard_after_forward: false
        param_dtype: bf16
        reduce_dtype: fp32
        output_dtype: null
        cast_forward_inputs: false
        offload_to_cpu: true
        pin_memory: false
        num_to_forward_prefetch: 3
        ignored_modules: []
        recompute_modules: [{MLP}, torch.nn.Linear]"""
    settings = fsdp2_config.read(write(tmp_path, text))
    assert settings == fsdp2_config.Settings(
        2, (LAYER,), False, "bf16", "fp32", None, False, True, False, 3, (), (MLP, "torch.nn.Linear")
    )
    assert settings.classes("recompute_modules")[1] is nn.Linear and settings.classes("ignored_modules") == ()
    assert fsdp2_config.read(write(tmp_path, "")) == fsdp2_config.Settings()


@pytest.mark.parametrize(
    "text, words",
    [
        ("param_dtyp: bf16", ["'param_dtyp'", 'did you mean "param_dtype"']),
        ("param_dtype: int8", ["param_dtype is 'int8'", "fp16, bf16, fp32, fp64"]),
        ("sharding_size: 0", ["sharding_size is 0", "whole number from 1"]),
        ("sharding_size: true", ["sharding_size is True"]),
        ("reshard_after_forward: 1", ["reshard_after_forward is 1", "from 2 on"]),
        ("reshard_after_forward: soon", ["reshard_after_forward is 'soon'", "true, false"]),
        ("cast_forward_inputs: 1", ["cast_forward_inputs is 1", "true or false"]),
        ("num_to_forward_prefetch: -1", ["num_to_forward_prefetch is -1"]),
        ("recompute_modules: Linear", ["recompute_modules is 'Linear'", "package.module.Class"]),
        ("param_dtype: bf16\nparam_dtype: fp32", ["line 2", '"param_dtype" is there twice']),
        ("[1, 2]", ["holds [1, 2]", "sharding_size"]),
        ("a: [", ["is not YAML", "param_dtype: bf16"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(OptionError) as error:
        fsdp2_config.read(write(tmp_path, text))
    assert all(word in str(error.value) for word in [*words, "--fsdp2-config-path"]), str(error.value)


@pytest.mark.parametrize(
    "name, word", [("no.such.Module", "cannot be imported"), ("torch.nn.Linea", "no class"), ("math.sqrt", "no class")]
)
def test_a_class_that_is_none_is_named(name, word):
    with pytest.raises(OptionError, match=word):
        fsdp2_config.Settings(ignored_modules=(name,)).classes("ignored_modules")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        fsdp2_config.read(str(tmp_path / "none"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.forwards, self.seen = nn.Linear(8, 8), nn.Linear(8, 8), 0, None

    def forward(self, x):
        self.forwards, self.seen = self.forwards + 1, x.dtype
        return x + self.second(torch.tanh(self.first(x)))


class Frozen(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Frozen(8, 8), Block(), Block()).double()
    model[1].requires_grad_(False)
    return model


def settings(**more) -> fsdp2_config.Settings:
    here = __name__
    return fsdp2_config.Settings(sub_modules_to_wrap=(f"{here}.Block",), ignored_modules=(f"{here}.Frozen",), **more)


def worker(rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from mindspeed_fx.megatron import torch_fsdp2

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).chunk(2)
    plain = build()
    sum(plain(part).square().mean() for part in x).div(2).backward()
    cases = {
        "all ranks": settings(reshard_after_forward=False, num_to_forward_prefetch=2),
        "copies": settings(sharding_size=1),
        "again": settings(recompute_modules=(f"{__name__}.Block",), offload_to_cpu=True),
        "narrow": settings(param_dtype="fp32", reduce_dtype="fp64", output_dtype="fp32"),
    }
    for case, chosen in cases.items():
        model = build()
        mesh = torch_fsdp2.make_mesh(chosen.sharding_size, dist.group.WORLD)
        torch_fsdp2.divide(model, chosen, mesh)
        assert [isinstance(m, FSDPModule) for m in model] == [True, False, True, True]
        weight = model[0].first.weight
        assert isinstance(weight, DTensor) and not isinstance(model[1].weight, DTensor)
        expected = (Replicate(), Shard(0)) if case == "copies" else (Shard(0),)
        assert weight.placements == expected and weight.to_local().shape[0] == (8 if case == "copies" else 4)
        output = model(x[rank])
        assert isinstance(model[0].first.weight, DTensor) == (case != "all ranks")  # kept whole for the backward
        output.double().square().mean().backward()
        assert output.dtype == (torch.float32 if case == "narrow" else torch.float64)
        assert model[2].seen == output.dtype and model[2].forwards == (2 if case == "again" else 1)
        tolerance = 1e-5 if case == "narrow" else 1e-12
        for one, other in zip(model.parameters(), plain.parameters()):
            if other.requires_grad:
                torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=tolerance, atol=tolerance)
    for wrong, words in ((settings(sharding_size=3), "does not divide the 2"), (cases["copies"], "1.weight")):
        try:
            model = build().requires_grad_(True)
            torch_fsdp2.divide(model, wrong, torch_fsdp2.make_mesh(wrong.sharding_size, dist.group.WORLD))
        except OptionError as error:
            assert words in str(error)
        else:
            raise AssertionError(words)
    dist.barrier()  # a rank that ends closes a group that the other one is still making
    dist.destroy_process_group()


def test_settings_reach_fully_shard(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))


FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion"
MORE = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"recompute_modules: [{LAYER}]\nreshard_after_forward: false\noffload_to_cpu: true",
        f"sub_modules_to_wrap: [{MLP}, megatron.core.transformer.attention.SelfAttention]\nrecompute_modules: [{MLP}]",
    ],
)
def test_a_run_by_a_file_is_the_replicated_run(tmp_path, text):
    flags = f"{FSDP2} --fsdp2-config-path {write(tmp_path, text)}"
    replicated = train("", 2, EAGER)
    for environ, count in ((EAGER, 0), (COMPILED, 1)):
        divided = train(flags, 2, environ | MORE)
        assert divided.graphs == [count] * 2
        for k, losses in replicated.losses.items():
            assert divided.losses[k] == pytest.approx(losses, rel=1e-5)
            assert divided.grad_norms[k] == pytest.approx(replicated.grad_norms[k], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text, world, environ", [("", 2, EAGER), ("", 2, COMPILED), ("sharding_size: 2", 4, EAGER)])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, text, world, environ):
    """Bitwise, two steps on, which the optimizer's states have made: of all ranks, and of two copies."""
    flags = f"{FSDP2} --fsdp2-config-path {write(tmp_path, text)} --lr-decay-iters 5 --train-iters 5"
    whole = train(flags, world, environ | MORE)
    train(f"{flags} --save {tmp_path}/saved --save-interval 2 --exit-interval 2", world, environ | MORE)
    rest = train(f"{flags} --load {tmp_path}/saved", world, environ | MORE)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4, 5)}
    assert rest.grad_norms == {k: whole.grad_norms[k] for k in (3, 4, 5)}
