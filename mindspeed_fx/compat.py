"""Every private or moving torch API that mindspeed_fx leans on, behind one name each.

Features are detected, never versions. Checked with torch 2.11 (CUDA), 2.13 (CPU). The rest of the package uses
public API or these names only.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

# --------------------------------------------------------------------------- tracing


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The FakeTensorMode of the first fake tensor (or of the symbols) in ``values``; None without one."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor

    for value in pytree.tree_leaves(values):
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return detect_fake_mode()


@contextlib.contextmanager
def tracing_fake(values: Sequence[Any]) -> Iterator[Any]:
    """Trace on the fake values' own mode. Dynamo's fake mode is not the TracingContext's but shares its shape
    environment; without this mode and the Python dispatcher, symbolic sizes are baked in or lose their source."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = fake_mode_of(values) or FakeTensorMode()
    with tracing(TracingContext(mode)), mode, enable_python_dispatcher():
        yield mode


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Real computation in the middle of a compilation: no proxy, functional or torch-function mode sees it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def new_fake_mode() -> Any:
    """A mode in which every tensor made is fake; constants of a model may be real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def wraps_tensors(tensor: torch.Tensor) -> bool:
    """True for subclasses that hold other tensors, such as DTensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def without_fake_mode() -> Any:
    """Context in which real tensors are made although a fake mode is active around us."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def make_fx_pre_dispatch(run: Callable, values: Sequence[Any], names: Sequence[str]) -> fx.GraphModule:
    """``run(*values)`` as a graph of ATen operators before autograd, with the origin of every node kept."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fx.traceback.preserve_node_meta():
        gm = make_fx(run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    for node, name in zip([n for n in gm.graph.nodes if n.op == "placeholder"], names):
        node._rename(name)
        node.target = node.name
    gm.recompile()
    return gm


def make_fx_decomposed(fn: Callable, values: Sequence[Any], decompositions: dict | None) -> fx.GraphModule:
    """``fn(*values)`` on fake values as a graph of ATen operators, decomposed by ``decompositions``.

    One value may stand in several places (DTensor gives operators of equal layout one fake result): ``make_fx`` tells inputs
    apart by object, so each gets an object of its own.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(values)
    with mode if mode is not None else contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
        values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
        return make_fx(fn, decomposition_table=decompositions or {}, tracing_mode="real", _allow_non_fake_inputs=True)(*values)


def _proxy_mode() -> Any:
    """The proxy mode in force while ``make_fx`` records, pre-dispatch or not."""
    from torch._ops import _get_dispatch_mode_pre_dispatch
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return mode if mode is not None else _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)


def _attach(tracer: Any, module: Any, stem: str) -> str:
    index = 0
    while hasattr(tracer.root, f"{stem}_{index}"):
        index += 1
    name = f"{stem}_{index}"
    if isinstance(module, torch.nn.Module):
        tracer.root.register_module(name, module)
    else:
        setattr(tracer.root, name, module)
    return name


def record_opaque(target: Any, args: tuple, kwargs: dict, value: Any) -> Any:
    """Record one node for a higher-order operator without tracing into it; its outputs are ``value``."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

    tracer = _proxy_mode().tracer

    def operand(a: Any) -> Any:
        if isinstance(a, fx.GraphModule):
            return tracer.create_proxy("get_attr", _attach(tracer, a, "body"), (), {})
        return tracer.unwrap_proxy(a)

    proxy = tracer.create_proxy("call_function", target, tuple(operand(a) for a in args), {k: operand(v) for k, v in kwargs.items()})
    with disable_proxy_modes_tracing():
        fresh = pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)
    return track_tensor_tree(fresh, proxy, constant=None, tracer=tracer)


def record_attribute(tensor: torch.Tensor) -> torch.Tensor:
    """Record a ``get_attr`` node for a constant tensor of the graph and return its fake value."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree
    from torch._subclasses.fake_tensor import FakeTensor

    tracer = _proxy_mode().tracer
    proxy = tracer.create_proxy("get_attr", _attach(tracer, tensor, "constant"), (), {})
    with disable_proxy_modes_tracing():
        if not isinstance(tensor, FakeTensor):
            from torch._subclasses.fake_tensor import FakeTensorMode

            mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            tensor = (mode or FakeTensorMode()).from_tensor(tensor, static_shapes=True)
    return track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def switch_autocast(target: Any, args: tuple) -> Any:
    """Enter or leave an autocast region while recording: the context manager records its own node and, unlike a call
    of the raw function, is really in force, so that the fake values have the dtypes of the region."""
    if target is torch.amp.autocast_mode._enter_autocast:
        device, dtype, enabled, cache_enabled = args
        region = torch.autocast(device_type=device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        region.__enter__()
        return region
    args[0].__exit__(None, None, None)
    return None


def is_higher_order(target: Any) -> bool:
    """True for operators that take graphs: autograd.Function, checkpoint, wrap, cond ..."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_autograd_function(target: Any) -> bool:
    """True for the node that Dynamo makes of ``autograd.Function.apply``."""
    return is_higher_order(target) and target.name() == "autograd_function_apply"


def is_checkpoint(target: Any) -> bool:
    """True for the node that Dynamo makes of ``torch.utils.checkpoint.checkpoint``."""
    return is_higher_order(target) and target.name() in ("tag_activation_checkpoint", "checkpoint")


def is_grad_mode_switch(target: Any) -> bool:
    """True for the node that turns autograd on or off for the nodes after it."""
    return target is torch._C._set_grad_enabled


def is_autocast_switch(target: Any) -> bool:
    """True for the nodes that enter and leave an autocast region."""
    return target in (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


def has_side_effect(target: Any) -> bool:
    """True for operators that must stay although nobody uses their result (assertions, collectives' waits ...)."""
    from torch.fx.node import _side_effectful_functions

    name = str(target)
    return target in _side_effectful_functions or name.startswith(("_c10d_functional", "c10d")) or "assert" in name or "sym_constrain" in name


def is_function_transform(target: Any) -> bool:
    """True for the calls by which a Dynamo graph enters or leaves ``torch.func`` transforms such as vmap."""
    return str(getattr(target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch"))


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
    """A plausible integer for a symbolic size, without adding a guard."""
    if isinstance(size, int):
        return size
    known = size.node.hint if hasattr(size, "node") else None
    return int(known) if known is not None else 4096


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


# --------------------------------------------------------------------------- Inductor and AOTAutograd


def inductor_config() -> dict[str, Any]:
    """Every settable entry of ``torch._inductor.config``, "a.b" for nested ones, with its value."""
    import torch._inductor.config as config

    return config.get_config_copy()


def inductor_decompositions() -> dict:
    """The decompositions Inductor traces with."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _custom_pass_classes() -> tuple[type, type]:
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

    return CustomGraphPass, CustomPartitionerFn


CustomPass, CustomPartitioner = _custom_pass_classes()


class ChainedPass(CustomPass):
    """Passes in one of Inductor's hooks, one after the other; known to caches when each of them is."""

    def __init__(self, passes: Sequence[Callable]):
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        known = [each.uuid() if isinstance(each, CustomPass) else None for each in self.passes]
        return None if None in known else repr(known)

    def __reduce__(self) -> tuple:
        return (str, (str(self.uuid()),))


def _after_installed(hook: str, ours: Any, config: dict) -> Any:
    """Our pass behind the one that the user, or torch_npu, has put into the same single slot."""
    import torch._inductor.config as inductor_config

    first = config.get(hook, getattr(inductor_config, hook))
    first = list(first) if isinstance(first, (list, tuple)) else [] if first is None else [first]
    return ChainedPass([*first, ours]) if first else ours


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], *, inner: Callable, pre_grad: Any, partitioner: Any, config: dict, caches: bool, post_grad: Any = None, decompositions: dict | None = None
) -> Callable:
    """``compile_fx`` with one composite object per hook; passes that are in a hook already run first.

    Args:
        inner: called as ``inner(gm, example_inputs, compile, **kwargs)`` for every forward, backward and inference graph.
        pre_grad: CustomPass on the Dynamo graph; with torch 2.13 it runs only when the AOTAutograd cache misses. None: none.
        config: further ``torch._inductor.config`` entries.
        caches: False compiles anew and stores nothing.
        post_grad: CustomPass that runs last on each graph before Inductor lowers it; None: none.
        decompositions: besides Inductor's own.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return inner(graph, example_inputs, compile_fx_inner, **kwargs)

    patches = {**config, "custom_partitioner_fn": partitioner}
    for hook, ours in (("pre_grad_custom_pass", pre_grad), ("post_grad_custom_post_pass", post_grad)):
        if ours is not None:
            patches[hook] = _after_installed(hook, ours, config)
    functorch = {"autograd_cache_allow_custom_autograd_functions": True}
    if not caches:
        patches.update(fx_graph_cache=False, fx_graph_remote_cache=False)
        functorch.update(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    known = functorch_config.get_config_copy()
    with functorch_config.patch(**{k: v for k, v in functorch.items() if k in known}):
        table = {**inductor_decompositions(), **decompositions} if decompositions else None
        return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches, decompositions=table)


def compile_without_codegen(gm: fx.GraphModule, inputs: Sequence[Any], *, inner: Callable, partition: Callable, decompositions: dict | None = None) -> Callable:
    """AOTAutograd around a graph that then runs operator by operator.

    Args:
        inner: called as ``inner(gm, example_inputs, side)``; returns what runs: a graph module, or a function of the inputs.
        partition: ``partition_fn`` of AOTAutograd.
        decompositions: operators that AOTAutograd splits.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(side: str) -> Callable:
        def compile_side(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
            made = inner(graph, example_inputs, side)
            return _boxed(made) if isinstance(made, fx.GraphModule) else make_boxed_func(made)

        return compile_side

    backend = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"), partition_fn=partition, decompositions=decompositions
    )
    return backend(gm, inputs)


def _boxed(gm: fx.GraphModule) -> Callable:
    """``gm`` as a function of one list, which it empties: what is saved for the backward dies with its last reader, not with the call."""
    from functorch.compile import make_boxed_func

    codegen = getattr(fx.graph, "_BoxedCodeGen", None)
    if codegen is None:
        return make_boxed_func(gm.forward)
    gm.graph.set_codegen(codegen())
    gm.recompile()

    def run(args: list) -> Any:
        return gm.forward(args)

    run._boxed_call = True
    return run


# --------------------------------------------------------------------------- small helpers


def example_value_of(node: fx.Node) -> Any:
    """The fake value of a node, wherever this torch keeps it."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of the graph and of its nested graphs; tensors are shared."""
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
    return fx.GraphModule(root, graph)


def layout_key(value: Any) -> tuple:
    """Equal for fake values that every trace treats alike."""
    if isinstance(value, torch.Tensor):
        return (str(value.shape), str(value.stride()), value.dtype, value.device, str(value.storage_offset()))
    return (str(value),)


def unused_attribute(gm: fx.GraphModule, stem: str) -> str:
    """A name ``stem_N`` that ``gm`` does not have yet."""
    index = 0
    while hasattr(gm, f"{stem}_{index}"):
        index += 1
    return f"{stem}_{index}"


def replace_graph(gm: fx.GraphModule, by: fx.GraphModule) -> None:
    """Make ``gm`` compute what ``by`` computes, in place: AOTAutograd holds on to the module it was given."""
    for node in by.graph.nodes:
        if node.op == "get_attr":
            name = unused_attribute(gm, "captured")
            setattr(gm, name, functools.reduce(getattr, node.target.split("."), by))
            node.target = name
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
