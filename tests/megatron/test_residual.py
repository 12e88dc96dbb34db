"""``--reuse-fp32-param``: bfloat16 weights and what is left of the float32 ones are trained bitwise as both whole."""

import contextlib
import io

import pytest
import torch

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import residual
from tests.megatron import optimizers

UPPER = [0, 1, 2, 3, 0x7E, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
"""Zero, subnormals, the least normals, ones, the greatest, infinity, NaNs of payloads."""


def values_with(upper):
    """All float32 values of the upper halves, in both signs."""
    halves = torch.tensor([*upper, *(half | 0x8000 for half in upper)], dtype=torch.int32)
    return ((halves[:, None] << 16) | torch.arange(65536, dtype=torch.int32)).view(torch.float32)


def check_both_ways(value):
    rounded, low, ties = residual.split(value)
    number, bits = ~value.isnan(), value.view(torch.int32)
    assert torch.equal(rounded.isnan(), ~number)
    assert torch.equal(rounded[number].view(torch.int16), value.bfloat16()[number].view(torch.int16))
    again = residual.join(rounded, low, ties).view(torch.int32)
    assert torch.equal(again, torch.where(number, bits, bits | residual.QUIET << 16))
    assert low.dtype == torch.int16 and low.numel() == value.numel()
    return ties


def test_float32_is_its_bfloat16_and_sixteen_bits_more():
    """All 65,536 lower halves beside uppers of every kind: the list has the ties at an even upper half alone."""
    ties = check_both_ways(values_with(UPPER))
    assert len(ties) == 2 * sum(1 for upper in UPPER if upper % 2 == 0 and upper < 0x7F80)


def test_every_upper_half():
    """Beside the lower halves around each bound of the rule."""
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    upper = torch.arange(65536, dtype=torch.int32) << 16
    check_both_ways((upper[:, None] | lower).view(torch.float32))


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (2, 3, 5)])
def test_shapes_and_strides(shape):
    value = torch.randn(shape)
    check_both_ways(value)
    if value.dim() == 3:
        assert torch.equal(residual.join(*residual.split(value.permute(2, 0, 1))), value.permute(2, 0, 1))


def both(sharded, steps=4, **config):
    plain = optimizers.build(sharded, **config)
    lean = optimizers.build(sharded, residual.reuse_weights, **config)
    return plain, lean, [optimizers.train(*pair, steps) for pair in (plain, lean)]


@pytest.mark.parametrize("sharded, name", [(False, "adam"), (False, "sgd"), (True, "adam")])
def test_training_is_bitwise_that_of_float32_main_weights(sharded, name):
    plain, lean, (expected, actual) = both(sharded, name=name)
    assert actual == expected and len(set(expected)) == len(expected)
    for p, q in zip(optimizers.bits(plain[0]), optimizers.bits(lean[0])):
        assert torch.equal(p, q)
    for p, q in zip(main_weights(plain[1]), main_weights(lean[1])):
        assert torch.equal(p, q)


def main_weights(optimizer):
    """Main weights in float32, of Megatron's optimizer or of a lean one."""
    inner = optimizer.chained_optimizers[0]
    mains = [main for group in inner.optimizer.param_groups for main in group["params"]]
    return [inner.float32_of(main) if hasattr(inner, "keepers") else main for main in mains]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_ties_are_trained_too(sharded):
    """Every main weight starts half-way between two bfloat16 values; half of them round down."""
    runs = []
    for change in (None, residual.reuse_weights):
        wrapped, optimizer = optimizers.build(sharded, change)
        inner = optimizer.chained_optimizers[0]
        with inner.all_restored() if change else contextlib.nullcontext():
            for group in inner.optimizer.param_groups:
                for main in group["params"]:
                    main.data.view(torch.int32).bitwise_or_(0x8000)
        inner._copy_main_params_to_model_params()
        runs.append([optimizers.train(wrapped, optimizer, 2), *optimizers.bits(wrapped), *main_weights(optimizer)])
    assert runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1:], runs[1][1:]))


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_two_bytes_a_weight_are_saved(sharded):
    plain, lean, _ = both(sharded)
    weights = sum(p.numel() for p in main_weights(plain[1]))
    keepers = lean[1].chained_optimizers[0].keepers.values()
    ties = sum(k.ties.numel() for k in keepers)
    more = 4 + 4 * ties  # one NaN for all, and the positions of ties
    assert optimizers.held_bytes(plain) - optimizers.held_bytes(lean) == 2 * weights - more
    assert ties < weights / 2**12


def test_one_part_of_the_main_weights_is_whole_in_a_step(monkeypatch):
    wrapped, optimizer = optimizers.build(True, residual.reuse_weights)
    inner = optimizer.chained_optimizers[0]
    whole, step = [], inner.step_whole

    def counted():
        mains = [k.main for k in inner.keepers.values()]
        whole.append(sum(main.numel() for main in mains if main.untyped_storage().nbytes() == 4 * main.numel()))
        return step()

    inner.step_whole = counted
    optimizers.train(wrapped, optimizer, 1)
    mains = [k.main.numel() for k in inner.keepers.values()]
    assert sum(whole) == sum(mains) and len(whole) > 4
    assert max(whole) <= max(max(mains), sum(mains) / residual.PARTS)


def test_a_main_weight_between_steps_is_nan_and_cannot_be_written():
    wrapped, optimizer = optimizers.build(False, residual.reuse_weights)
    main = next(iter(optimizer.chained_optimizers[0].keepers))
    assert main.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        main.data.copy_(torch.ones(main.shape))


def loaded(saved, sharded, change):
    """A new model and optimizer with the saved states, which are bytes."""
    wrapped, optimizer = optimizers.build(sharded, change)
    model, state = torch.load(io.BytesIO(saved))
    wrapped.load_state_dict(model)
    optimizer.load_state_dict(state)
    return wrapped, optimizer


@pytest.mark.parametrize("saves", [None, residual.reuse_weights], ids=["plain", "lean"])
def test_a_state_is_float32_and_loads_either_way(saves):
    """The state of the 16-bit optimizer (--ckpt-format torch)."""
    source = optimizers.build(False, saves)
    optimizers.train(*source, 2)
    file = io.BytesIO()
    torch.save((source[0].state_dict_for_save_checkpoint(), source[1].state_dict()), file)
    expected = optimizers.train(*source, 3, first=2)
    for change in (None, residual.reuse_weights):
        wrapped, optimizer = loaded(file.getvalue(), False, change)
        assert optimizers.train(wrapped, optimizer, 3, first=2) == expected
        assert all(map(torch.equal, optimizers.bits(wrapped), optimizers.bits(source[0])))


def test_weights_from_elsewhere_become_main_weights():
    """What Megatron calls when a model is loaded without its optimizer."""
    runs = []
    for change in (None, residual.reuse_weights):
        wrapped, optimizer = optimizers.build(False, change)
        optimizers.train(wrapped, optimizer, 2)
        with torch.no_grad():
            for p in wrapped.parameters():
                p.mul_(0.5)
        optimizer.reload_model_params()
        runs.append([optimizers.train(wrapped, optimizer, 2), *optimizers.bits(wrapped)])
    assert runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1:], runs[1][1:]))


def test_an_optimizer_of_another_class_is_refused():
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    class Other(Float16OptimizerWithFloat16Params):
        pass

    with pytest.raises(OptionError, match="--reuse-fp32-param: not done for Other"):
        residual.reuse_weights(object.__new__(Other))
