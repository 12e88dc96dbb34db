"""Every private or moving torch API that mindspeed_fx leans on, behind one name each.

Features are detected, never versions. Checked with torch 2.11 (CUDA), 2.13 (CPU). The rest of the package uses
public API or these names only.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import torch
import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

# --------------------------------------------------------------------------- fake values


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a fake tensor: views of one tensor share it."""
    return tensor.untyped_storage()._cdata


def fake_like(value: Any) -> Any:
    """The fake mode that ``value`` was made under, as a context; nothing when it is real."""
    from torch._subclasses.fake_tensor import FakeTensor

    mode = next((v.fake_mode for v in pytree.tree_leaves(value) if isinstance(v, FakeTensor)), None)
    return mode if mode is not None else contextlib.nullcontext()


def layout(tensor: torch.Tensor) -> tuple:
    """Strides that mean something: those of dimensions longer than one, as text, so that symbols compare without guards."""
    return tuple(0 if isinstance(n, int) and n <= 1 else str(s) for n, s in zip(tensor.shape, tensor.stride()))


def hint(size: Any) -> int:
    """A plausible integer for a symbolic size, also for a ragged one, which has no number; adds no guard."""
    if isinstance(size, int):
        return size
    known = size.node.hint if hasattr(size, "node") else None
    return 4096 if known is None or isinstance(known, torch.SymInt) else int(known)


def refresh_values(gm: fx.GraphModule) -> None:
    """Recompute the fake value of every ATen call whose inputs' layout changed, so that strides stay true."""
    stale: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        old = node.meta.get("val")
        if not isinstance(old, torch.Tensor) or node.target._schema.is_mutable:
            continue
        if not node.meta.get("fresh") and not any(a in stale for a in node.all_input_nodes):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with fake_like(old), torch.no_grad():
            new = node.target(*args, **kwargs)
        if new.stride() != old.stride() or new.dtype != old.dtype or node.meta.pop("fresh", False):
            node.meta["val"] = new
            stale.add(node)


# --------------------------------------------------------------------------- small helpers


def example_value_of(node: fx.Node) -> Any:
    """The fake value of a node, wherever this torch keeps it."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of the graph and of its nested graphs; tensors are shared. Its code is written when it is called."""
    memo: dict = {}
    root = torch.nn.Module()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), gm)
            if "." not in node.target:
                setattr(root, node.target, copy_graph(value) if isinstance(value, fx.GraphModule) else value)
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, memo)
    graph.output(output)
    return lazy_graph(root, graph)


def lazy_graph(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of this graph whose code is written when it is called."""
    return _LazyGraphModule(root, graph)


def recompile_when_called(gm: fx.GraphModule) -> None:
    """The code of ``gm`` is out of date: it is written when it is next called or read, as of what Dynamo hands over. (AOTAutograd's backward graphs are not so by
    themselves; every graph module has a class of its own.)"""
    if type(gm).__bases__ == (fx.GraphModule,) and type(gm) is not fx.GraphModule:
        type(gm).__bases__ = (_LazyGraphModule,)
    gm.recompile()


def layout_key(value: Any) -> tuple:
    """Equal for fake values that every trace treats alike."""
    if isinstance(value, torch.Tensor):
        return (str(value.shape), str(value.stride()), value.dtype, value.device, str(value.storage_offset()))
    return (str(value),)


def view_may_leave(node: fx.Node) -> bool:
    """False when what ``node`` computes cannot be a view: it leaves the graph beside its own ``detach()``.

    AOTAutograd makes such outputs anew from the tensor they view, and forgets the views that lie before a ``detach`` ("incorrect out shape
    after application of ViewMeta sequence", torch 2.11 to 2.13).
    """
    output = next(iter(reversed(node.graph.nodes)))
    return output not in node.users or not any(u.target is torch.ops.aten.detach.default and output in u.users for u in node.users)


def unused_attribute(gm: fx.GraphModule, stem: str) -> str:
    """A name ``stem_N`` that ``gm`` does not have yet."""
    index = 0
    while hasattr(gm, f"{stem}_{index}"):
        index += 1
    return f"{stem}_{index}"


def replace_graph(gm: fx.GraphModule, by: fx.GraphModule) -> None:
    """Make ``gm`` compute what ``by`` computes, in place: AOTAutograd holds on to the module it was given.

    A parameter or buffer of ``gm`` keeps its name: AOTAutograd makes inputs of those, and asks Dynamo where each comes from.
    """
    names = {id(tensor): name for name, tensor in (*gm.named_buffers(), *gm.named_parameters())}
    for node in by.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), by)
            if id(value) not in names:
                names[id(value)] = unused_attribute(gm, "captured")
                setattr(gm, names[id(value)], value)
            node.target = names[id(value)]
    # The inputs stay: Dynamo hangs their sources on the nodes.
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    memo = dict(zip([n for n in by.graph.nodes if n.op == "placeholder"], inputs))
    output = gm.graph.graph_copy(by.graph, memo)
    gm.graph.output(output)
    gm.recompile()


def rank() -> int:
    """This process's rank in the default group; 0 without one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Ranks of the default group; 1 without one."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# --------------------------------------------------------------------------- bisecting


_BISECT = ("mindspeed", "passes")


def register_bisector() -> None:
    """Let ``torch._inductor.compiler_bisector`` search among our passes; without its table (private) do nothing."""
    from torch._inductor import compiler_bisector as bisector

    if hasattr(bisector, "BACKENDS") and hasattr(bisector, "BisectSubsystem"):
        bisector.BACKENDS.setdefault(_BISECT[0], [bisector.BisectSubsystem(_BISECT[1])])


def bisector_disables(name: str) -> bool:
    """True when a running bisection has switched this pass off."""
    from torch._inductor.compiler_bisector import CompilerBisector

    if not CompilerBisector.get_backend() == _BISECT[0]:
        return False
    return CompilerBisector.disable_subsystem(*_BISECT, lambda: name)


def bisecting() -> bool:
    """True while a bisection over our passes runs."""
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.get_backend() == _BISECT[0]


def torch_compile_replaced() -> str | None:
    """Why ``torch.compile`` is not torch's own, as after ``import mindspeed.megatron_adaptor``; None when it is."""
    import mindspeed_fx

    ours = torch.compile is mindspeed_fx._torch_compile
    return None if ours or mindspeed_fx._is_torchs_own(torch.compile) else mindspeed_fx._replacement_error()


def compile_with_backend(model: Callable, *, backend: Any = "mindspeed", options: dict | None = None, fullgraph: bool = False, dynamic: bool | None = None) -> Callable:
    """Torch's own ``torch.compile`` with our backend, whatever ``torch.compile`` is now."""
    import mindspeed_fx

    return mindspeed_fx._torch_compile(model, backend=backend, options=options, fullgraph=fullgraph, dynamic=dynamic)


def rebuilt_torch_compile(model: Callable, *, backend: Any = "inductor", options: dict | None = None, mode: str | None = None, fullgraph: bool = False, dynamic: bool | None = None) -> Callable:
    """What ``torch.compile`` does, from its parts: for a process in which the function itself was lost."""
    import torch._dynamo

    if backend == "inductor":
        wrapped: Any = torch._TorchCompileInductorWrapper(mode or (None if options else "default"), options, dynamic)
    else:
        wrapped = torch._TorchCompileWrapper(backend, mode or "default", options, dynamic)
    return torch._dynamo.optimize(backend=wrapped, nopython=fullgraph, dynamic=dynamic)(model)


@functools.cache
def onednn_beats_blas() -> bool:
    """True where oneDNN is present and torch's BLAS is MKL on a processor that is not Intel's."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if not torch.backends.mkl.is_available():
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return "GenuineIntel" not in file.read(4096)
    except OSError:
        return False


def structured_tracing() -> bool:
    """True when torch writes structured traces (``TORCH_TRACE``), which tlparse reads."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers) and any(type(h).__name__ != "LazyTraceHandler" or getattr(h, "root_dir", None) for h in trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Write one text artifact to torch's structured trace."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


@contextlib.contextmanager
def collecting_graph_breaks() -> Iterator[list[str]]:
    """Texts of the graph breaks that Dynamo meets within, one for each, with the line of the model."""
    import torch._dynamo.utils as utils

    found: list[str] = []
    before = dict(utils.counters["graph_break"])
    try:
        yield found
    finally:
        for reason, count in utils.counters["graph_break"].items():
            found.extend([" ".join(reason.split())] * (count - before.get(reason, 0)))


def fresh_callable(model: Callable) -> Callable:
    """Something Dynamo has not compiled yet: its caches hang on code objects, which a second compile would hit."""
    if isinstance(model, torch.nn.Module):
        return model

    @functools.wraps(model)
    def fresh(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return fresh


def recompiling() -> Any:
    """Context in which Dynamo compiles however many variants of one code object it has already."""
    import torch._dynamo.config as config

    limits = {"recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"}
    return config.patch({name: 2**20 for name in limits if name in config.get_config_copy()})


def cache_directory() -> str:
    """Where Inductor keeps compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def statically_known_true(condition: object) -> bool:
    """``condition``, a bool or a symbolic one, where it holds for every size without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def has_kernel(operator: str, key: str) -> bool:
    """Whether ``operator``, as in "aten::mm", has a kernel of its own for a dispatch key, as in "Meta"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def allow_side_effects_under_checkpoint() -> Callable[[], None]:
    """Let Dynamo capture a checkpointed function with side effects, which a recomputation skips; returns what takes that
    back. Nothing happens where Dynamo has no such setting."""
    import torch._dynamo.config as config

    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if not hasattr(config, name):
        return lambda: None
    before = getattr(config, name)
    setattr(config, name, True)
    return lambda: setattr(config, name, before)


def varlen_attention_of_torch() -> Any:
    """The operator behind ``torch.nn.attention.varlen.varlen_attn``; None where this torch has none or it was not imported."""
    operator = getattr(getattr(torch.ops, "torch_attn", None), "_varlen_attn", None)
    return getattr(operator, "default", None)
