"""torch's and transformers' own parallelism around a compiled model, on two gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.scenarios.hooks import Stack
from tests.scenarios.table import scenario
from tests.scenarios.trainer import model as llama


def preload() -> None:
    import torch.distributed.fsdp  # noqa: F401
    from torch.distributed.tensor import parallel  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def steps(model: Any, parameters: Any, x: torch.Tensor, named: Any = None, count: int = 2) -> Any:
    optimizer, losses = torch.optim.SGD(parameters, 0.05), []
    for _ in range(count):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        losses.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": dict(named or {})}


def part(rank: int) -> torch.Tensor:
    return torch.randn(2, 2, 8, 32, generator=torch.Generator().manual_seed(9))[rank]


@scenario(
    "torch.distributed/ddp/{}", ("compile_outside", "compile_inside", "no_sync", "static_graph", "fp16_hook", "buckets")
)
def run_ddp(run: Any, kind: str) -> Any:
    return run.ranks(_ddp, run=run, kind=kind)


def _ddp(rank: int, run: Any, kind: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, x = Stack(), part(rank)
    if kind == "buckets":  # of at least a megabyte: torch cuts the graph between them
        model, x = Stack(2, 256), part(rank).repeat(1, 1, 8)
    how: dict[str, Any] = {"static_graph": dict(static_graph=True), "buckets": dict(bucket_cap_mb=1.0)}.get(kind, {})
    if kind == "compile_inside":
        wrapped = DistributedDataParallel(run.compile(model))
    else:
        ddp = DistributedDataParallel(model, **how)
        if kind == "fp16_hook":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        wrapped = run.compile(ddp)
    if kind == "no_sync":
        with wrapped.no_sync() if run.name is None else wrapped._orig_mod.no_sync():
            wrapped(x * 0.5).square().mean().backward()
    values = steps(wrapped, list(model.parameters()), x, model.named_parameters())
    if kind == "fp16_hook":
        values = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16(), values)
    return values


FSDP2 = ("each_layer", "compile_layers", "no_reshard", "bfloat16", "accumulation", "checkpointing", "offload", "llama")


@scenario("torch.distributed/fsdp2/{}", FSDP2)
def run_fsdp2(run: Any, kind: str) -> Any:
    return run.ranks(_fsdp2, run=run, kind=kind)


def _fsdp2(rank: int, run: Any, kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (2,)), part(rank)
    how: dict[str, Any] = dict(mesh=mesh, reshard_after_forward=kind != "no_reshard")
    if kind == "bfloat16":
        how |= dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    if kind == "offload":
        how |= dict(offload_policy=CPUOffloadPolicy(pin_memory=False))
    if kind == "llama":
        one = llama()
        for layer in one.model.layers:
            fully_shard(layer, **how)
        fully_shard(one, **how)
        compiled = run.compile(one)
        ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(rank))
        call = lambda _: compiled(input_ids=ids, labels=ids).loss
        return steps(call, list(one.parameters()), x, one.named_parameters())
    model = Stack()
    if kind == "checkpointing":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    for layer in model.layers:
        if kind == "compile_layers" and run.name:
            layer.compile(backend=run.name)
        fully_shard(layer, **how)
    fully_shard(model, **how)
    compiled = model if kind == "compile_layers" else run.compile(model)
    if kind == "accumulation":
        model.set_requires_gradient_sync(False)
        compiled(x * 0.5).square().mean().backward()
        model.set_requires_gradient_sync(True)
    values = steps(compiled, list(model.parameters()), x, model.named_parameters())
    if kind == "bfloat16":
        values = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: _whole(t).bfloat16(), values)
    return values


def _whole(t: Any) -> torch.Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()


@scenario("torch.distributed/fsdp1/{}", ("use_orig_params", "wrapped_layers"))
def run_fsdp1(run: Any, kind: str) -> Any:
    return run.ranks(_fsdp1, run=run, kind=kind)


def _fsdp1(rank: int, run: Any, kind: str) -> Any:
    from functools import partial

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from tests.scenarios.hooks import Block

    torch.manual_seed(0)
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}) if kind == "wrapped_layers" else None
    model = FullyShardedDataParallel(
        Stack(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    compiled, x, losses = run.compile(model), part(rank), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses}


TENSOR = ("colwise_rowwise", "sequence", "loss_parallel", "prepared_inputs", "with_fsdp2")


@scenario("torch.distributed/parallelize_module/{}", TENSOR)
def run_tensor_parallel(run: Any, kind: str) -> Any:
    return run.ranks(_tensor_parallel, run=run, kind=kind)


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(32)
        self.up, self.gate, self.down = (torch.nn.Linear(*s, bias=False) for s in ((32, 64), (32, 64), (64, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def _tensor_parallel(rank: int, run: Any, kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), part(0)
    model = torch.nn.Sequential(Mlp(), Mlp(), torch.nn.Linear(32, 16, bias=False))
    for block in (model[0], model[1]):
        plan: dict[str, Any] = {"up": tp.ColwiseParallel(), "gate": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        if kind == "sequence":
            plan = {
                "": tp.PrepareModuleInputOutput(
                    input_layouts=(Replicate(),),
                    desired_input_layouts=(Shard(1),),
                    use_local_input=False,
                    output_layouts=(Shard(1),),
                    desired_output_layouts=(Replicate(),),
                ),
                "norm": tp.SequenceParallel(use_local_output=False),
                "up": tp.ColwiseParallel(input_layouts=Shard(1)),
                "gate": tp.ColwiseParallel(input_layouts=Shard(1)),
                "down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        if kind == "prepared_inputs":
            plan["norm"] = tp.PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
            plan["norm"] = tp.SequenceParallel(sequence_dim=1, use_local_output=False)
            plan["up"] = plan["gate"] = tp.ColwiseParallel(input_layouts=Shard(1))
        tp.parallelize_module(block, mesh, plan)
    if kind == "loss_parallel":
        tp.parallelize_module(model[2], mesh, tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
        compiled, losses = run.compile(model), []
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        labels = torch.arange(16) % 16
        with tp.loss_parallel():
            for _ in range(2):
                loss = torch.nn.functional.cross_entropy(compiled(x).flatten(0, 1), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return {"losses": losses, "weights": dict(model.named_parameters())}
    if kind == "with_fsdp2":
        from torch.distributed.fsdp import fully_shard

        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Sequential(Mlp(), Mlp())
        for block in model:
            tp.parallelize_module(
                block,
                both["tp"],
                {"up": tp.ColwiseParallel(), "gate": tp.ColwiseParallel(), "down": tp.RowwiseParallel()},
            )
            fully_shard(block, mesh=both["dp"])
        fully_shard(model, mesh=both["dp"])
    compiled, losses = run.compile(model), []
    for _ in range(2):
        loss = compiled(x).square().mean()
        loss.backward()
        losses.append(_whole(loss))
    return {"losses": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}}


@scenario("transformers/tp_plan_auto/{}", ("llama", "qwen3", "mixtral"))
def run_tp_plan(run: Any, kind: str) -> Any:
    return run.ranks(_tp_plan, run=run, kind=kind)


def _tp_plan(rank: int, run: Any, kind: str) -> Any:
    import tempfile

    from transformers import AutoModelForCausalLM

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if rank == 0:
        llama(kind).save_pretrained(folder[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", dtype=torch.float32)
    compiled, losses = run.compile(model), []
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(_whole(loss))
    return {"losses": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}}


@scenario("torch.distributed/functional/{}", ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"))
def run_collective(run: Any, kind: str) -> Any:
    return run.ranks(_collective, run=run, kind=kind)


def _collective(rank: int, run: Any, kind: str) -> Any:
    import torch.distributed._functional_collectives as funcol

    x = torch.arange(8.0).view(4, 2) + rank

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if kind == "all_reduce":
            return funcol.all_reduce(y, "sum", dist.group.WORLD) + 1
        if kind == "all_gather":
            return funcol.all_gather_tensor(y, 0, dist.group.WORLD) + 1
        if kind == "reduce_scatter":
            return funcol.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD) + 1
        if kind == "all_to_all":
            return funcol.all_to_all_single(y, None, None, dist.group.WORLD) + 1
        return funcol.broadcast(y, 0, dist.group.WORLD) + 1

    return run.compile(step)(x)


@scenario("torch.distributed/in_place/{}", ("all_reduce", "all_gather_into", "in_autograd_function"))
def run_in_place(run: Any, kind: str) -> Any:
    return run.ranks(_in_place, run=run, kind=kind)


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g / 2


def _in_place(rank: int, run: Any, kind: str) -> Any:
    x = (torch.arange(8.0).view(4, 2) + rank).requires_grad_()
    if kind == "in_autograd_function":
        out = run.compile(lambda x: Mean.apply(x * 2) * (rank + 1))(x)
        out.sum().backward()
        return [out, x.grad]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.detach() * 2
        if kind == "all_reduce":
            dist.all_reduce(y)
            return y + 1
        whole = torch.empty(8, 2)
        dist.all_gather_into_tensor(whole, y)
        return whole + 1

    return run.compile(step)(x)


@scenario("torch.distributed/pipelining")
def run_pipelining(run: Any) -> Any:
    return run.ranks(_pipelining, run=run)


def _pipelining(rank: int, run: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    model, x = Stack(), part(0)
    mine = model.layers[rank]
    stage = PipelineStage(run.compile(mine), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    losses: list[torch.Tensor] = []
    schedule.step(x) if rank == 0 else schedule.step(target=x, losses=losses)
    return {"losses": losses, "gradients": {n: p.grad for n, p in mine.named_parameters()}}


@scenario("torch.distributed/checkpoint_of_fsdp2")
def run_distributed_checkpoint(run: Any) -> Any:
    return run.ranks(_checkpoint_state, run=run)


def _checkpoint_state(rank: int, run: Any) -> Any:
    """torch.distributed.checkpoint of a compiled and sharded model."""
    import tempfile

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, x = Stack(1), part(rank)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    compiled = run.compile(model)
    steps(compiled, list(model.parameters()), x)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(compiled), checkpoint_id=folder[0])
    first = compiled(x).detach()
    steps(compiled, list(model.parameters()), x)
    state = get_model_state_dict(compiled)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(compiled, state)
    return {"first": first, "again": compiled(x).detach()}
