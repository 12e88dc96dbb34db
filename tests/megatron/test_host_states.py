"""``--swap-optimizer``: training with main weights and states on the host is bitwise training without."""

import contextlib
import io

import pytest
import torch

from mindspeed_fx.megatron import host_states
from tests.megatron import optimizers

KINDS = {"whole": dict(sharded=False), "sharded": dict(sharded=True), "float32": dict(sharded=False, bf16=False)}


def swapped(times=4):
    return lambda optimizer: host_states.swap_states(optimizer, times)


def weights_and_states(optimizer):
    """What the inner optimizer has of each weight, wherever it lies."""
    inner = optimizer.chained_optimizers[0]
    with inner.all_restored() if hasattr(inner, "keepers") else contextlib.nullcontext():
        weights = [w for group in inner.optimizer.param_groups for w in group["params"]]
        states = [v for w in weights for v in inner.optimizer.state[w].values()]
        return [t.detach().clone() for t in (*weights, *states)]


@pytest.mark.parametrize(
    "kind, name, times",
    [
        *((kind, "adam", 4) for kind in KINDS),
        ("whole", "sgd", 1),
        ("sharded", "adam", 1),
        ("whole", "adam", 1000),
    ],
)
def test_training_is_bitwise_that_without(kind, name, times):
    runs = []
    for change in (None, swapped(times)):
        pair = optimizers.build(change=change, name=name, **KINDS[kind])
        losses = optimizers.train(*pair, 3)
        runs.append([losses, *optimizers.bits(pair[0]), *weights_and_states(pair[1])])
        states = len(runs[-1]) - 1 - len(optimizers.bits(pair[0]))
        assert states == (3 if name == "adam" else 2) * len(optimizers.bits(pair[0]))
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == 6
    assert all(map(torch.equal, runs[0][1:], runs[1][1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_are_on_the_device_in_a_step_and_none_between(kind):
    times = 6
    wrapped, optimizer = optimizers.build(change=swapped(times), **KINDS[kind])
    inner = optimizer.chained_optimizers[0]
    keepers, step, on_device = list(inner.keepers.values()), inner.step_whole, []

    def counted():
        on_device.append(sum(k.device_bytes() for k in keepers))
        return step()

    inner.step_whole = counted
    optimizers.train(wrapped, optimizer, 3)
    each = 8 if kind == "float32" else 12
    largest = max(k.main.numel() for k in keepers)
    part = max(largest, sum(k.main.numel() for k in keepers) / times)
    total = each * sum(k.main.numel() for k in keepers)
    last = on_device[2 * len(on_device) // 3 :]  # states are there from the first step on
    assert each * largest < max(last) <= 2 * each * part < total
    assert sum(k.device_bytes() for k in keepers) == 0
    assert sum(t.nbytes for k in keepers for t in k.host.values()) == total


def test_a_part_is_copied_to_the_device_before_its_turn():
    """The order of copies, as a stream of their own needs it: the next part's before the step of this one."""
    wrapped, optimizer = optimizers.build(True, swapped())
    inner = optimizer.chained_optimizers[0]
    events, step = [], inner.step_whole
    stream = next(iter(inner.keepers.values())).stream
    for name in ("to_device", "to_host", "wait", "synchronize"):
        call = getattr(stream, name)
        setattr(stream, name, lambda *a, name=name, call=call: (events.append(name), call(*a))[1])
    inner.step_whole = lambda: (events.append("step"), step())[1]
    optimizers.train(wrapped, optimizer, 2)
    second = events[events.index("synchronize") + 1 :]
    first, *_, last = [i for i, event in enumerate(second) if event == "step"]
    assert second.index("wait") < first  # what is stepped has arrived
    assert "to_device" in second[second.index("wait") : first]  # and the next is on its way
    assert "to_device" not in second[last:] and second[-1] == "synchronize"
    assert second.count("to_device") == second.count("to_host") == 3 * len(inner.keepers)


@pytest.mark.parametrize("kind", ["whole", "float32"])
@pytest.mark.parametrize("saves", [None, swapped()], ids=["plain", "swapped"])
def test_a_state_loads_either_way(saves, kind):
    """The state of the optimizer (--ckpt-format torch)."""
    source = optimizers.build(change=saves, **KINDS[kind])
    optimizers.train(*source, 2)
    file = io.BytesIO()
    torch.save((source[0].state_dict_for_save_checkpoint(), source[1].state_dict()), file)
    expected = optimizers.train(*source, 3, first=2)
    for change in (None, swapped()):
        file.seek(0)
        wrapped, optimizer = optimizers.build(change=change, **KINDS[kind])
        model, state = torch.load(file)
        wrapped.load_state_dict(model)
        optimizer.load_state_dict(state)
        if change:
            keepers = optimizer.chained_optimizers[0].keepers.values()
            assert not sum(k.device_bytes() for k in keepers)
        assert optimizers.train(wrapped, optimizer, 3, first=2) == expected
        assert all(map(torch.equal, optimizers.bits(wrapped), optimizers.bits(source[0])))
