"""Part of compat: what torch_npu moves or keeps private, behind one name each. torch_npu is imported here and nowhere
else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any, Callable, Mapping, Sequence

import torch
import torch._dynamo  # before AOTAutograd, which imports it in a circle
import torch.fx as fx
from torch import Tensor
from torch._functorch._aot_autograd import runtime_wrappers

aten = torch.ops.aten

RETURN_ARGUMENTS = {"npu::_npu_moe_token_unpermute"}
"""Operators of torch_npu that return an argument as one of their results, for their backward, which their schema does
not say.
"""


def problem() -> str | None:
    """Why torch_npu cannot be used in this process; None when it is imported or can be."""
    return None if importlib.util.find_spec("torch_npu") else "torch_npu is not installed"


def accept_aliases() -> None:
    """Lets torch_npu's own operators return their arguments.

    AOTAutograd checks the results of every custom operator at a graph's first call. Its word to the user is a warning,
    or, where the environment has CI set, an error; neither is anything that the user could mend. Nothing of ours reads
    such a result.
    """
    check = getattr(runtime_wrappers, "_check_custom_op_aliasing", None)
    if check is None or hasattr(check, "accepts"):
        return

    @functools.wraps(check)
    def checked(name: str, *args: Any, **kwargs: Any) -> None:
        if name not in RETURN_ARGUMENTS:
            check(name, *args, **kwargs)

    checked.accepts = RETURN_ARGUMENTS
    runtime_wrappers._check_custom_op_aliasing = checked


def load_inductor() -> None:
    """torch_npu's Inductor: its loading installs lowerings and passes, which must be there before ours are put beside
    them.
    """
    if problem() is None:
        importlib.import_module("torch_npu._inductor")


def npugraph_ex(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable:
    """``gm`` compiled by torch_npu's npugraph_ex: its own passes, then capture and replay as an ACL graph.

    Raises:
        ValueError: an option that npugraph_ex does not know.
    """
    import torch_npu  # noqa: F401  registers the module below

    return torch.npu.npugraph_ex.compile_fx(gm, inputs, dict(options))


def decompositions() -> dict:
    """What AOTAutograd must split on npu so that its graphs have the operators they have elsewhere.

    torch_npu gives ``aten.matmul`` a derivative of its own, so that a linear layer is one opaque ``matmul`` forward and
    one ``matmul_backward`` with both gradients backward; nothing could then be done to one of the two.
    """
    return {aten.matmul.default: matmul, aten.matmul_backward.default: matmul_backward}


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; one product of matrices where ``b`` is a matrix, whatever the strides of ``a``."""
    from torch._decomp.decompositions import matmul as split

    if a.dim() < 3 or b.dim() != 2:
        return split(a, b)
    return torch.mm(a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])


def matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``a @ b`` of any ranks, as ``aten.matmul_backward``; folded to one product where ``b`` is a matrix.

    Args:
        grad: of the result.
        a, b: [k], [m, k] or [..., m, k], and [k], [k, n] or [..., k, n].
        mask: which of the two are wanted; the other is None.
    """
    if not isinstance(grad, Tensor):
        return None, None
    if a.dim() == 1 and b.dim() == 1:
        return grad * b if mask[0] else None, grad * a if mask[1] else None
    rows, columns = (a.unsqueeze(0), b) if a.dim() == 1 else (a, b.unsqueeze(-1) if b.dim() == 1 else b)
    grad = grad.unsqueeze(-2) if a.dim() == 1 else grad.unsqueeze(-1) if b.dim() == 1 else grad
    if columns.dim() == 2:
        flat = grad.reshape(-1, grad.shape[-1])
        da = (flat @ columns.t()).reshape(rows.shape) if mask[0] else None
        db = rows.reshape(-1, rows.shape[-1]).t() @ flat if mask[1] else None
    else:
        da = (grad @ columns.transpose(-1, -2)).sum_to_size(rows.shape) if mask[0] else None
        db = (rows.transpose(-1, -2) @ grad).sum_to_size(columns.shape) if mask[1] else None
    return da.reshape(a.shape) if da is not None else None, db.reshape(b.shape) if db is not None else None


def profiler(
    *,
    schedule: Mapping[str, int],
    path: str,
    worker: str,
    level: str,
    export: str,
    simplify: bool,
    with_cpu: bool,
    **settings: bool,
) -> Any:
    """``torch_npu.profiler.profile`` with the arguments that its documentation gives, started by its ``start()``.

    Args:
        schedule: arguments of ``torch_npu.profiler.schedule``.
        path, worker: the folder of the traces, and what their names begin with.
        level: "level_none", "level0", "level1" or "level2"; counters of the cores are those of the pipes, from level1.
        export: "text" or "db".
        simplify: raw data are removed.
        with_cpu: calls on the host too.
        settings: ``record_shapes``, ``profile_memory``, ``with_stack``.
    """
    import torch_npu

    api = torch_npu.profiler
    has_counters = level in ("level1", "level2")
    config = api._ExperimentalConfig(
        export_type=[getattr(api.ExportType, export.capitalize())],
        profiler_level=getattr(api.ProfilerLevel, level.capitalize()),
        aic_metrics=api.AiCMetrics.PipeUtilization if has_counters else api.AiCMetrics.AiCoreNone,
        data_simplification=simplify,
    )
    return api.profile(
        activities=[api.ProfilerActivity.NPU, *([api.ProfilerActivity.CPU] if with_cpu else [])],
        schedule=api.schedule(**schedule),
        on_trace_ready=api.tensorboard_trace_handler(path, worker_name=worker),
        experimental_config=config,
        **settings,
    )


def hccl_options(config: Mapping[str, int]) -> Any:
    """Options of a process group of HCCL's; None where the process's groups are another backend's.

    Args:
        config: "hccl_buffer_size" in MiB, "hccl_op_expansion_mode".
    """
    import torch.distributed as dist

    module = sys.modules.get("torch_npu")
    if module is None or not dist.is_initialized() or "hccl" not in dist.get_backend():
        return None
    options = module._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = dict(config)
    return options


def hcom(group: str) -> str:
    """Name of a process group's HCCL communicator, as torch_npu's fused operators take it; the group's own name where
    it has no NPU backend: graphs are then traced, or emulated on CPU."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(group)._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())
    except Exception:  # no device type "npu", no such group, or a backend of another kind
        return group
