"""``--use-torch-fsdp2``: torch's FSDP2 in Megatron's wrapper, by the file of ``--fsdp2-config-path`` if there is one.

Megatron-core 0.16.1 ends a step with ``finish_grad_sync(force_all_reduce=...)``, which its wrapper of FSDP2 does not
take, and fails in its first step; gradients are there reduced already. How a chunk is one graph stands in
:mod:`mindspeed_fx.megatron.fsdp2_graph`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mindspeed_fx.compat import dtensor
from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import fsdp2_config, groups, patches
from mindspeed_fx.megatron.fsdp2_config import FLAG, TYPES, Settings
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch
from mindspeed_fx.megatron.run_arguments import training_arguments

FINISH = "distributed.data_parallel_base:_BaseDataParallel.finish_grad_sync"
INIT = "distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.__init__"
GROUP_OF = "utils:get_data_parallel_group_if_dtensor"
SAVED = tuple(f"utils:make_{kind}sharded_tensor_for_checkpoint" for kind in ("tp_", ""))
REPLICATE, SHARD = "replicate", "shard"


def finish_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
    """``_BaseDataParallel.finish_grad_sync``: nothing is left to be done."""


def init(self: Any, config: Any, ddp_config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``TorchFullyShardedDataParallel.__init__``, by the settings of the run's file where there is one."""
    arguments = training_arguments()
    path, chosen = getattr(arguments, "fsdp2_config_path", None), getattr(arguments, "mindspeed_layerzero", None)
    if path is None and chosen is None:
        patches.original(INIT)(self, config, ddp_config, module, *args, **kwargs)
        return
    from megatron.core import parallel_state
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    _BaseDataParallel.__init__(self, config=config, module=module)
    group = kwargs.get("process_group")
    self.process_group = group or parallel_state.get_data_parallel_group(with_context_parallel=True)
    self.ddp_config, settings = ddp_config, fsdp2_config.read(path) if chosen is None else Settings(**chosen)
    self.device_mesh = make_mesh(settings.sharding_size, self.process_group)
    kept = {name: dict(vars(p)) for name, p in module.named_parameters()}  # Megatron's marks, which FSDP2 drops
    divide(module, settings, self.device_mesh)
    for name, parameter in module.named_parameters():
        for mark, value in kept.get(name, {}).items():
            setattr(parameter, mark, value)


def make_mesh(sharding_size: int | None, group: Any) -> Any:
    """The ranks of ``group`` in one dimension, or copies of the weights by the ranks that share one.

    Raises:
        OptionError: the ranks are no whole number of copies.
    """
    from torch.distributed import DeviceMesh

    ranks = dist.get_process_group_ranks(group)
    size = len(ranks) if sharding_size is None else sharding_size
    if len(ranks) % size:
        raise OptionError(
            f"{FLAG}: sharding_size is {size}, which does not divide the {len(ranks)} data-parallel ranks"
        )
    if size == len(ranks):
        return DeviceMesh.from_group(group, groups.kind(), mesh_dim_names=(SHARD,))
    rows, columns = [], []
    for line in groups.everybodys(group):  # every rank makes all groups, in one order
        grid = [line[i : i + size] for i in range(0, len(line), size)]
        rows += [list(row) for row in grid]
        columns += [list(column) for column in zip(*grid)]
    own, _ = dist.new_subgroups_by_enumeration(rows)
    copies, _ = dist.new_subgroups_by_enumeration(columns)
    mesh = torch.tensor(ranks, device="cpu").view(-1, size)
    return DeviceMesh.from_group([copies, own], groups.kind(), mesh=mesh, mesh_dim_names=(REPLICATE, SHARD))


def divide(model: nn.Module, settings: Settings, mesh: Any) -> None:
    """``fully_shard`` of ``model`` and the modules within it that the settings name.

    Raises:
        OptionError: a class cannot be imported, or an ignored module trains, whose gradients FSDP2 does not reduce.
    """
    from torch.distributed.fsdp import fully_shard

    ignored = settings.classes("ignored_modules")
    options = {
        "mesh": mesh,
        "reshard_after_forward": settings.reshard_after_forward,
        "mp_policy": _precision(settings),
        "offload_policy": _offload(settings),
        "ignored_params": _ignored_parameters(model, ignored),
    }
    classes, again = _wrapped_classes(model, settings), settings.classes("recompute_modules")
    wrapped = [m for m in _children_first(model) if isinstance(m, classes) and not isinstance(m, ignored)]
    for module in wrapped:
        fully_shard(module, **options)
    for i, module in enumerate(wrapped):
        ahead = wrapped[i + 1 : i + 1 + settings.num_to_forward_prefetch]
        if ahead:
            module.set_modules_to_forward_prefetch(ahead)
        if again:  # what is computed again would change the order that torch has seen in the forward
            module.set_modules_to_backward_prefetch(wrapped[i - 1 : i] if i else [])
    if model not in wrapped:
        fully_shard(model, **options)
    for module in (m for m in model.modules() if isinstance(m, again)):
        module.forward = functools.partial(_recomputed, module.forward)


def _precision(settings: Settings) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    names = ("param_dtype", "reduce_dtype", "output_dtype")
    types = {name: TYPES[getattr(settings, name)] for name in names if getattr(settings, name)}
    return MixedPrecisionPolicy(**types, cast_forward_inputs=settings.cast_forward_inputs)


def _offload(settings: Settings) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not settings.offload_to_cpu:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=settings.pin_memory and groups.has_accelerator())


def _ignored_parameters(model: nn.Module, classes: tuple[type, ...]) -> set[nn.Parameter]:
    parameters = {}
    for name, module in model.named_modules():
        if isinstance(module, classes):
            parameters |= {f"{name}.{n}": p for n, p in module.named_parameters()}
    trained = [name for name, p in parameters.items() if p.requires_grad]
    if trained:
        raise OptionError(
            f"{FLAG}: ignored_modules leaves {trained[0]} whole, which trains: FSDP2 does not reduce its gradient; "
            "freeze it, or take its class out of ignored_modules"
        )
    return set(parameters.values())


def _wrapped_classes(model: nn.Module, settings: Settings) -> tuple[type, ...]:
    """Those of the file; by default those of Megatron, for layers without TransformerEngine, and the model's own."""
    if settings.sub_modules_to_wrap is not None:
        return settings.classes("sub_modules_to_wrap")
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.transformer_layer import TransformerLayer

    own = {c for m in model.modules() for c in getattr(m, "_fsdp_modules", ())}
    return (TransformerLayer, LanguageModelEmbedding, RotaryEmbedding, *own)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _recomputed(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of which the backward keeps the inputs alone."""
    if torch.compiler.is_compiling():
        return torch_checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return torch_checkpoint(forward, *args, use_reentrant=False, context_fn=_same_draws, **kwargs)


def _same_draws() -> tuple[Any, Any]:
    """Contexts of a forward and of its second run, which draws what the first drew from Megatron's tracker too."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = get_cuda_rng_tracker().get_states()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(dict(states))
        try:
            yield
        finally:
            tracker.set_states(now)

    return contextlib.nullcontext(), again()


def is_divided(chunk: nn.Module) -> bool:
    """Whether FSDP2 divides the model in ``chunk``."""
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel

    while isinstance(chunk, nn.Module):
        if isinstance(chunk, TorchFullyShardedDataParallel):
            return True
        chunk = getattr(chunk, "module", None)
    return False


def group_of_gradient(tensor: Any, data_parallel_group: Any = None) -> Any:
    """``get_data_parallel_group_if_dtensor``: the ranks that share one copy, where there are several."""
    if not _has_copies(tensor):
        return patches.original(GROUP_OF)(tensor, data_parallel_group)
    return tensor.device_mesh.get_group(SHARD)


def _saved(target: str) -> Callable:
    def make(tensor: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        """Each shard is that of the ranks that share one copy, and every copy a replica."""
        if _has_copies(tensor):
            from megatron.core import parallel_state

            mesh = tensor.device_mesh
            tp_group = kwargs.get("tp_group") or parallel_state.get_tensor_model_parallel_group()
            place = 0 if target == SAVED[0] else tp_group.rank()
            replica = (0, place, mesh.get_local_rank(REPLICATE))
            kwargs |= {"tp_group": tp_group, "dp_cp_group": mesh.get_group(SHARD), "replica_id": replica}
        return patches.original(target)(tensor, key, *args, **kwargs)

    return make


def _has_copies(tensor: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == (REPLICATE, SHARD)


def table() -> list[Patch]:
    """The patches."""
    copies = "with sharding_size of --fsdp2-config-path the data-parallel ranks hold several copies"
    return [
        Patch(FINISH, finish_grad_sync, "Megatron's FSDP2 has nothing to do at a step's end", EVERYWHERE),
        Patch(INIT, init, "Megatron's wrapper of FSDP2 has none of the settings of --fsdp2-config-path", EVERYWHERE),
        Patch(
            "utils:to_local_if_dtensor", dtensor.local_part, "states are found by the identity of weights", EVERYWHERE
        ),
        Patch(GROUP_OF, group_of_gradient, copies, EVERYWHERE),
        *(Patch(target, _saved(target), copies, EVERYWHERE) for target in SAVED),
    ]
