"""Processes, mesh and plan of train_hf.py: who has which part of the model, named or searched."""

from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import tempfile
import time
import uuid
from argparse import Namespace
from typing import Any

import hf_checkpoint
import torch
import torch.distributed as dist
from hf_arguments import fail
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.errors import OptionError
from mindspeed_fx.sharding.presets import named_plan

COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""Device -> backend of torch.distributed; checkpoints are written beside training by messages over gloo."""
PLAN = "plan.yaml"
HARDWARE = {"cpu": "cpu"}
"""Device -> name for the search, where the machine's own is not found."""


def find_device(args: Namespace) -> torch.device:
    """This rank's device; ends the run where there is none of the kind that ``--device`` names."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    if args.device == "npu":
        try:
            import torch_npu  # noqa: F401
        except ImportError as error:
            fail(f"--device npu: torch_npu cannot be imported ({error}); valid here: {', '.join(devices_here())}")
    if args.device not in devices_here():
        fail(f"--device {args.device}: torch finds none; valid here: {', '.join(devices_here())}")
    if args.device == "cpu":
        return torch.device("cpu")
    module = getattr(torch, args.device)
    if (count := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > module.device_count():
        fail(f"--device {args.device}: there are {module.device_count()}, and torchrun started {count} processes")
    module.set_device(local)
    return torch.device(args.device, local)


def devices_here() -> list[str]:
    """Kinds of devices that torch has on this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([accelerator.type] if accelerator and accelerator.type in COLLECTIVES else [])]


def start_processes(args: Namespace) -> None:
    """Joins torchrun's processes; a process alone that is to have a plan is a world of one."""
    if args.world_size == 1 and args.plan == "none":
        return
    limit = datetime.timedelta(minutes=30)
    rank, world, store = 0, 1, None
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        store = dist.PrefixStore(agree_on_word(store, rank, world), store)
    else:
        store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group(COLLECTIVES[args.device], store=store, rank=rank, world_size=world, timeout=limit)


def agree_on_word(store: dist.Store, rank: int, world: int) -> str:
    """A word that the processes of this start have, and those of no start before.

    torchrun's agent (torch 2.13) keeps one store over all its starts, so that a process that is started again may find
    the address of a dead one. The first rank answers every greeting until it is heard: that of a dead rank leads to
    nothing.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"greeting/{rank}", own)
        word = store.get(f"answer/{own}").decode()  # waits
        store.set(f"heard/{word}/{rank}", "")
        return word
    waiting = set(range(1, world))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"greeting/{other}"]):
                store.set(f"answer/{store.get(f'greeting/{other}').decode()}", own)
            if store.check([f"heard/{own}/{other}"]):
                waiting.discard(other)
        time.sleep(0.01)
    return own


def choose_plan(args: Namespace, losses: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, dict[str, int]]:
    """(plan, mesh sizes); the first rank searches, before the processes join, so that the plan is tried; with a search
    the others wait for it in :func:`share_plan`.

    Args:
        args: of the run.
        losses: the model on the host.
        batch: a microbatch for a named plan, a global batch for a search.
    """
    if args.plan == "none":
        return None, {}
    try:
        if args.plan == "search":
            return _search(args, losses, batch) if args.rank == 0 else (None, {})
        path = pathlib.Path(args.plan)
        if path.suffix in (".yaml", ".yml", ".json"):
            plan = mindspeed_fx.Plan.load(str(path))
            sizes = getattr(plan, "sizes", None) or mesh_sizes(args, plan.mesh)
        else:
            plan, stages = _named(args.plan, losses, batch)
            sizes = mesh_sizes(args, plan.mesh, stages)
    except (OptionError, OSError) as error:
        fail(f"--plan {args.plan}: {error}")
    return plan, sizes


def _named(name: str, losses: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, int | None]:
    """(the plan of names joined by "+", of which "pp2" asks for two stages; how many stages it asks for)."""
    words = name.split("+")
    stages = [w for w in words if w.startswith("pp") and (w[2:] or "1").isdigit()]
    others = [w for w in words if w not in stages]
    plan = None
    if others:
        reads = set(others) & {"tp", "tp_sp", "tp_2d"}
        plan = named_plan("+".join(others), losses, kwargs=batch if reads else None)
    if not stages:
        return plan, None
    own = mindspeed_fx.Plan(stages[0], ("pp",), keep_whole=True)
    return own + plan if plan is not None else own, int(stages[0][2:] or 0) or None


def _search(args: Namespace, losses: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, dict[str, int]]:
    """Searched once for a run: what goes on takes the plan that lies beside its checkpoints, if it is for as many
    processes."""
    stored = pathlib.Path(args.save, PLAN)
    if hf_checkpoint.goes_on(args) and stored.is_file():
        sizes = json.loads(stored.with_suffix(".json").read_text())
        if math.prod(sizes.values()) == args.world_size:
            return mindspeed_fx.Plan.load(str(stored)), sizes
    space = {"mesh": parse_mesh(args.mesh)} if args.mesh else {"devices": args.world_size}
    space |= {"memory": args.memory} if args.memory else {}
    space |= {"microbatches": args.accumulate} if args.accumulate else {}
    hardware = args.hardware or HARDWARE.get(args.device)
    plan = mindspeed_fx.plan(losses, (), batch, hardware=hardware, pipeline=args.pipeline, **space)
    if plan.unsupported:
        fail(f"--plan search: {plan.name} cannot run: {'; '.join(plan.unsupported)}; name a plan, or give --mesh")
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.with_suffix(".json").write_text(json.dumps(dict(plan.sizes)))
    plan.save(str(stored))
    return plan, dict(plan.sizes)


def share_plan(plan: Any, sizes: dict[str, int]) -> tuple[Any, dict[str, int]]:
    """The first rank's searched plan, on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, PLAN)
        message: list[Any] = [None, None]
        if dist.get_rank() == 0:
            plan.save(str(path))
            message = [path.read_text(), sizes]
        dist.broadcast_object_list(message, src=0)
        path.write_text(message[0])
        return mindspeed_fx.Plan.load(str(path)), message[1]


def parse_mesh(text: str) -> dict[str, int]:
    """``dp=2,tp=4`` -> sizes by mesh dimension, the outermost first."""
    sizes = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not size.isdigit() or int(size) < 1 or not name.isidentifier():
            fail(f"--mesh {text}: {part!r} is no size; sizes such as dp=2,tp=4 are expected")
        sizes[name] = int(size)
    return sizes


def mesh_sizes(args: Namespace, dims: tuple[str, ...], stages: int | None = None) -> dict[str, int]:
    """The sizes of a plan's mesh: ``--mesh``, or all processes on one dimension, or on several as evenly as it goes,
    the outermost having more; ``stages``: those that the plan's name asks for.
    """
    if args.mesh:
        sizes = parse_mesh(args.mesh)
        if set(sizes) != set(dims):
            fail(f"--mesh {args.mesh}: plan {args.plan} has the dimensions {', '.join(dims)}")
        return {d: sizes[d] for d in dims}
    left, sizes = args.world_size, {}
    if stages is not None:
        if left % stages:
            fail(f"--plan {args.plan}: {stages} stages do not divide {left} processes")
        inner, left = dims[1:], left // stages
        if not inner and left > 1:
            fail(f"--plan {args.plan}: {stages} stages, and {args.world_size} processes; join another name by +")
        dims, sizes = inner, {"pp": stages}
    names = [*sizes, *dims]
    for place, dim in enumerate(reversed(dims), 1):
        rest = len(dims) - place
        size = left if not rest else max(d for d in range(1, left + 1) if left % d == 0 and d ** (rest + 1) <= left)
        sizes[dim], left = size, left // size
    return {d: sizes[d] for d in names}


def divide(args: Namespace, losses: nn.Module, plan: Any, sizes: dict[str, int], device: torch.device) -> nn.Module:
    """The model on this rank's device: divided by the plan, or whole where there is none."""
    if plan is None:
        return losses.to(device)
    if (count := math.prod(sizes.values())) != args.world_size:
        words = ", ".join(f"{d}={n}" for d, n in sizes.items())
        fail(f"--mesh {words} is of {count} processes; torchrun started {args.world_size}")
    mesh = init_device_mesh(args.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    try:
        return mindspeed_fx.parallelize(losses.to(device), mesh, plan)
    except OptionError as error:
        fail(f"--plan {args.plan}: {error}")
