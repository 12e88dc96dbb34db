"""A step of a parallelized model in gloo processes, saved by one job and loaded by the next; run by
test_saved_parts.py."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils as utils
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from tests.sharding.llama import Llama


class Dropped(Llama):
    """Draws random numbers."""

    def forward(self, ids, labels):
        return super().forward(ids, labels) * nn.functional.dropout(torch.ones(4), 0.5).sum()


def step(model, ids, labels):
    return model(ids, labels)


def parallelized(sizes, plan, inputs="whole", kind=Llama):
    """Model, and arguments as a rank passes them."""
    torch.manual_seed(0)
    model = kind(1)
    ids, labels = (torch.randint(0, 64, (4, 16)) for _ in range(2))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = mindspeed_fx.parallelize(model, mesh, plan, inputs=inputs)
    if inputs == "local":
        ids, labels = (x.chunk(mesh.size())[mesh.get_rank()].contiguous() for x in (ids, labels))
    return model, (ids, labels)


def run(function, model, args):
    """Loss and gradients of a step, and the state of random numbers behind it."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = function(*args)
    loss.backward()
    gradients = [p.grad.to_local().clone() for p in model.parameters()]
    return [loss.detach(), *gradients, torch.random.get_rng_state()]


def load(function, path, **settings):
    """The step, and why its file was not taken."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = mindspeed_fx.load_compiled(function, path, **settings)
    told = [str(w.message) for w in caught if "is not taken" in str(w.message)]
    assert bool(told) == (loaded.reason is not None)
    return loaded


def begin(rank, folder, world, cache, groups=0):
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, cache))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{cache}", world), rank=rank, world_size=world)
    for _ in range(groups):
        dist.new_group(list(range(world)))


def save_worker(rank, folder, sizes, plan, inputs, dynamic, kind):
    """Writes the file."""
    begin(rank, folder, math.prod(sizes.values()), "cache")
    model, args = parallelized(sizes, plan, inputs, kind)
    saved = mindspeed_fx.save_compiled(step, f"{folder}/step.mfx", (model, *args), dynamic=dynamic)
    equals_compiled(saved, model, args, dynamic)
    dist.destroy_process_group()


def equals_compiled(loaded, model, args, dynamic):
    """Bitwise, on the same tensors: products of other places in memory may round otherwise."""
    own = run(loaded, model, (model, *args))
    assert loaded.reason is None and not loaded.misses
    compiled = torch.compile(step, backend="mindspeed", fullgraph=True, dynamic=dynamic)
    assert all(map(torch.equal, own, run(compiled, model, (model, *args))))


def counted():
    """Frames that Dynamo traced, and graphs that AOTAutograd and Inductor looked for, or compiled."""
    return {
        "frames": utils.counters["frames"].get("total", 0),
        "graphs": sum(n for word, n in utils.counters["inductor"].items() if word.startswith("fxgraph_cache")),
        "traced": utils.counters["aot_autograd"].get("total", 0),
    }


def load_worker(rank, folder, sizes, plan, inputs, dynamic, kind):
    """Another job, whose groups have other names and whose caches are empty, runs what the first one compiled."""
    begin(rank, folder, math.prod(sizes.values()), "empty", groups=3)
    model, args = parallelized(sizes, plan, inputs, kind)
    loaded = load(step, f"{folder}/step.mfx", dynamic=dynamic)
    assert loaded.reason is None, loaded.reason
    first = loaded(model, *args)
    first.backward()
    counts = counted()
    if dynamic:
        torch.testing.assert_close(loaded(model, *(x.repeat(2, 1) for x in args)), first)
        assert not loaded.misses
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
    equals_compiled(loaded, model, args, dynamic)
    text = {"reason": loaded.reason, "misses": loaded.misses, "counts": counts}
    Path(folder, f"loaded{rank}.json").write_text(json.dumps(text))
    dist.destroy_process_group()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def small(dims=("tp",), columns="up", whole=False):
    torch.manual_seed(0)
    model = Small()
    if whole:
        return model
    mesh = init_device_mesh("cpu", (1,) * (len(dims) - 1) + (2,), mesh_dim_names=dims)
    return mindspeed_fx.parallelize(model, mesh, plan(columns))


def plan(columns):
    rows = "down" if columns == "up" else "up"
    parameters = {f"{columns}.weight": {"tp": "S(0)"}, f"{rows}.weight": {"tp": "S(1)"}}
    return mindspeed_fx.Plan("mine", ("tp",), parameters=parameters)


def small_step(model, x):
    return model(x)


def load_and_call(whole, path, function, *args):
    """Why the file was not taken, which the first call says where it brings the model."""
    loaded = mindspeed_fx.load_compiled(function, path)
    assert loaded.reason is None
    with pytest.warns(UserWarning, match="is not taken, and the step is compiled anew: "):
        torch.testing.assert_close(loaded(*args), whole(args[-1]))
    return loaded.reason


def refusals_worker(rank, folder):
    """A file of another rank, plan, mesh; of a model that is whole; and one whose model comes with the arguments."""
    begin(rank, folder, 2, "cache")
    x = torch.ones(4, 8)
    path = f"{folder}/small.mfx"
    model = small()
    saved = mindspeed_fx.save_compiled(model, path, (x,))
    mindspeed_fx.save_compiled(small_step, f"{folder}/function.mfx", (model, x))
    loaded = load(model, path)
    assert loaded.reason is None, loaded.reason
    assert all(map(torch.equal, run(loaded, model, (x,)), run(saved, model, (x,)))) and not loaded.misses, loaded.misses
    dist.barrier()
    whole = small(whole=True)
    reasons = {
        "rank": load(small(), f"{path}.rank{1 - rank}").reason,
        "plan": load(small(columns="down"), path).reason,
        "mesh": load(small(dims=("dp", "tp")), path).reason,
        "whole": load_and_call(whole, f"{folder}/function.mfx", small_step, whole, x),
        "missing": load(small(), f"{folder}/other.mfx").reason,
    }
    reasons["argument"] = load_and_call(whole, f"{folder}/function.mfx", small_step, small(columns="down"), x)
    dist.barrier()
    Path(folder, f"reasons{rank}.json").write_text(json.dumps(reasons))
    dist.destroy_process_group()


class Holder:
    """Holds a model where nobody looks for it."""

    def __init__(self, model):
        self.inside = [[copy.copy(lambda: model)]]


def unsaved_worker(rank, folder):
    """What cannot be written is refused by name."""
    from mindspeed_fx.errors import OptionError

    begin(rank, folder, 2, "cache")
    holder, x = Holder(small()), torch.ones(4, 8)

    def hidden(x):
        return holder.inside[0][0]()(x)

    texts = []
    for function, settings in ((hidden, {}), (small_step, {"options": {"codegen": "eager"}})):
        args = (x,) if function is hidden else (small(), x)
        try:
            mindspeed_fx.save_compiled(function, f"{folder}/unsaved.mfx", args, **settings)
        except OptionError as error:
            texts.append(str(error))
    Path(folder, f"texts{rank}.json").write_text(json.dumps(texts))
    dist.destroy_process_group()
