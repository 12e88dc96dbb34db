"""Part of :mod:`mindspeed_fx.compat`: Inductor and AOTAutograd, their settings and hooks."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import (
    backward_writes,
    called_graphs,
    cpu_code,
    fake,
    graph_inputs,
    inductor_cache,
    inductor_patterns,
    inductor_scheduler,
    structured_trace,
)
from mindspeed_fx.errors import OptionError


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
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    inner: Callable,
    pre_grad: Any,
    partitioner: Any,
    config: dict,
    caches: bool,
    joint_cache: bool = True,
    post_grad: Any = None,
    decompositions: dict | None = None,
) -> Callable:
    """``compile_fx`` with one composite object per hook; passes that are in a hook already run first.

    Args:
        inner: called as ``inner(gm, example_inputs, compile, **kwargs)`` for every forward, backward and inference
            graph.
        pre_grad: CustomPass on the Dynamo graph; with torch 2.13 it runs only when the AOTAutograd cache misses. None:
            none.
        config: further ``torch._inductor.config`` entries.
        caches: False compiles anew and stores nothing.
        joint_cache: False leaves out AOTAutograd's, which knows a backward as one function; Inductor's, of the code of
            each graph, stays.
        post_grad: CustomPass that runs last on each graph before Inductor lowers it; None: none.
        decompositions: besides Inductor's own.

    Raises:
        OptionError: no C++ compiler works.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor import exc
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inductor_cache.leave_untrusted_cache()
    _mend_forks()
    inductor_patterns.keep_dtype_of_running_sums()
    inductor_patterns.read_every_keyword()
    inductor_patterns.keep_results_apart()
    called_graphs.keep_inputs()
    called_graphs.allow_calls_that_wait()
    called_graphs.keep_equal_values()
    inductor_scheduler.keep_writes_before_reads()
    inductor_scheduler.keep_targets_of_writes()
    inductor_scheduler.split_equal_loops_alone()

    @functools.wraps(compile_fx_inner)
    def lower(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with cpu_code.written(example_inputs), structured_trace.without_unread_details():
            return compile_fx_inner(graph, example_inputs, **kwargs)

    @functools.wraps(compile_fx_inner)
    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        fake.take_layouts(graph, example_inputs)
        return inner(graph, example_inputs, lower, **kwargs)

    patches = {**config, "custom_partitioner_fn": partitioner}
    for hook, ours in (("pre_grad_custom_pass", pre_grad), ("post_grad_custom_post_pass", post_grad)):
        if ours is not None:
            patches[hook] = _after_installed(hook, ours, config)
    functorch = {"autograd_cache_allow_custom_autograd_functions": True}
    if not caches:
        patches.update(fx_graph_cache=False, fx_graph_remote_cache=False)
    if not caches or not joint_cache:
        functorch.update(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    known = functorch_config.get_config_copy()
    settings = functorch_config.patch(**{k: v for k, v in functorch.items() if k in known})
    with settings, structured_trace.without_unread_graphs(), backward_writes.allowed():
        table = {**inductor_decompositions(), **decompositions} if decompositions else None
        try:
            return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches, decompositions=table)
        except exc.InductorError as error:
            if not isinstance(error.inner_exception, exc.InvalidCxxCompiler):
                raise
            raise OptionError(
                'option "codegen" is "inductor", and no C++ compiler works here (tried '
                f'{_compilers()}); install g++, set CXX, or give codegen "eager"'
            ) from error


def compile_later(
    inner: Callable, whole: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[fx.GraphModule], Callable]:
    """What compiles ``whole``, or a part of it, as ``inner`` does now, also when Inductor's own call is over: a
    function of one list.

    Args:
        inputs, kwargs: of ``inner``, for the whole.
    """
    import torch._inductor.config as config
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext, TracingContext, compile_context, tracing

    for node, x in zip((n for n in whole.graph.nodes if n.op == "placeholder"), inputs, strict=True):
        node.meta["val"] = x
    known, number = TracingContext.try_get(), CompileContext.try_get()
    settings = {name: getattr(config, name) for name in config.get_config_copy()}  # copies of hooks are no hooks

    def later(gm: fx.GraphModule) -> Callable:
        output = gm.graph.output_node()
        output.meta["user_visible_output_idxs"] = [i for i, n in enumerate(output.args[0]) if isinstance(n, fx.Node)]
        inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        metadata = getattr(known, "fw_metadata", None)
        donated = getattr(metadata, "bw_donated_idxs", None)
        if donated is not None and gm is not whole:  # numbers of the whole's inputs, which it may overwrite
            metadata.bw_donated_idxs = None
        try:
            with tracing(known), compile_context(number), get_metrics_context(), config.patch(settings):
                return inner(gm, inputs, **{**kwargs, "static_input_idxs": ()})
        finally:
            if donated is not None:
                metadata.bw_donated_idxs = donated

    return later


def _compilers() -> str:
    """The C++ compilers that Inductor tries."""
    import torch._inductor.config as config

    own = config.cpp.cxx
    return ", ".join(c for c in (own if isinstance(own, (list, tuple)) else (own,)) if c)


@functools.cache
def _mend_forks() -> None:
    """Inductor (2.11 to 2.14) forgets its pool of processes in a fork, but not its pool of threads, which a fork does
    not have: what is compiled there would wait for them for ever.
    """
    from torch._inductor.async_compile import AsyncCompile

    forget = getattr(getattr(AsyncCompile, "pool", None), "cache_clear", None)
    if forget is not None and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def compile_without_codegen(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    inner: Callable,
    partition: Callable,
    decompositions: dict | None = None,
    keep_writes: bool = False,
) -> Callable:
    """AOTAutograd around a graph that then runs operator by operator.

    Args:
        inner: called as ``inner(gm, example_inputs, side)``; returns what runs: a graph module, or a function of the
            inputs.
        partition: ``partition_fn`` of AOTAutograd.
        decompositions: operators that AOTAutograd splits.
        keep_writes: inputs are written by the graphs, not after them. AOTAutograd needs it for an input that the
            backward writes after the forward did: with writes after the graphs, both come after the forward.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(side: str) -> Callable:
        def compile_side(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
            result = inner(graph, example_inputs, side)
            if getattr(result, "_boxed_call", False):
                return result
            return box_arguments(result) if isinstance(result, fx.GraphModule) else make_boxed_func(result)

        return compile_side

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=keep_writes,
    )
    with structured_trace.without_unread_graphs(), backward_writes.allowed():
        return backend(gm, inputs)


def box_arguments(gm: fx.GraphModule) -> Callable:
    """``gm`` as a function of one list, which it empties: what is saved for the backward dies with its last reader, not
    with the call.
    """
    from functorch.compile import make_boxed_func

    codegen = getattr(fx.graph, "_BoxedCodeGen", None)
    if codegen is None:
        return make_boxed_func(gm.forward)
    gm.graph.set_codegen(codegen())
    gm.recompile()

    first = [True]

    def run(args: list) -> Any:
        if first:
            first.clear()
            args[:] = map(graph_inputs.as_plain, args)
        return gm.forward(args)

    run._boxed_call = True
    return run


def view_may_leave(node: fx.Node) -> bool:
    """False when what ``node`` computes cannot be a view: it leaves the graph beside its own ``detach()``.

    AOTAutograd makes such outputs anew from the tensor they view, and forgets the views that lie before a ``detach``
    ("incorrect out shape after application of ViewMeta sequence", torch 2.11 to 2.13).
    """
    output = node.graph.output_node()
    return output not in node.users or not any(
        u.target is torch.ops.aten.detach.default and output in u.users for u in node.users
    )


def written(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """``node``, which generated code writes to memory once, whatever it would compute again where it is read: where a
    layout is asked for, Inductor realizes a value (``ir.ExternKernel.require_stride_order``); this one has it already.
    """
    from torch._inductor import inductor_prims

    strides = [fake.hint(s) for s in node.meta["val"].stride()]  # their order is all that is read
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(inductor_prims.force_stride_order, (node, strides))
    new.meta = dict(node.meta)
    return new


def is_written(node: fx.Node) -> bool:
    """Whether ``node`` is what :func:`written` gives."""
    return _primitive(node) == "inductor_force_stride_order"


@contextlib.contextmanager
def kernels_in_traces() -> Iterator[None]:
    """Graphs compiled inside name each of their C++ kernels in torch.profiler's traces, as those of Triton always are;
    a few microseconds for each call of a kernel.
    """
    import torch._inductor.config as config

    with config.patch({"cpp.enable_kernel_profile": True}):
        yield


def writes_cpp_wrapper(settings: Mapping[str, Any]) -> bool:
    """Whether Inductor's calling code is C++ too, by these settings or its own."""
    import torch._inductor.config as config

    return bool(settings.get("cpp_wrapper", config.cpp_wrapper))


def is_seed(node: fx.Node) -> bool:
    """Whether a call gives a seed of Inductor's random numbers, which no other has."""
    return _primitive(node) in ("inductor_seed", "inductor_seeds", "inductor_lookup_seed")


def number_seeds(graph: fx.Graph) -> None:
    """Give every call that takes a seed from a row of them one of its own, in the order of the graph."""
    for seeds in [n for n in graph.nodes if _primitive(n) == "inductor_seeds"]:
        readers = [n for n in graph.nodes if n in seeds.users and _primitive(n) == "inductor_lookup_seed"]
        for i, reader in enumerate(readers):
            reader.args = (seeds, i)
        if seeds.args[0] < len(readers):
            seeds.args = (len(readers), *seeds.args[1:])
            with fake.fake_like(seeds.meta["val"]):
                seeds.meta["val"] = seeds.target(*seeds.args, **seeds.kwargs)


def place_of_seed(node: fx.Node) -> int | None:
    """Which of a row of seeds a call takes; None for other calls."""
    return node.args[1] if _primitive(node) == "inductor_lookup_seed" else None  # type: ignore[return-value]


def take_seed(node: fx.Node, place: int | None) -> None:
    """Have a call that takes a seed from a row take another."""
    node.args = (node.args[0], place)


def draws_by_seed(node: fx.Node) -> bool:
    """Whether a call draws by a seed that it reads, and so the same with the same."""
    return _primitive(node) in ("inductor_random", "inductor_randint")


def _primitive(node: fx.Node) -> str:
    target = node.target
    named = isinstance(target, torch._ops.OpOverload) and target.namespace == "prims"
    return target._schema.name.split("::")[1] if named else ""


@contextlib.contextmanager
def kernels_by_node() -> Iterator[None]:
    """As :func:`kernels_in_traces`; and for graphs compiled inside :func:`kernel_nodes` has an answer, where this torch
    keeps one."""
    import torch._inductor.config as config

    name = "trace.provenance_tracking_level"
    with kernels_in_traces(), config.patch({name: 2} if name in config.get_config_copy() else {}):
        yield


def compiler_seconds() -> float:
    """Seconds that Inductor has waited in this process for compilers of what it generates; 0.0 where this torch does
    not count them."""
    from torch._dynamo.utils import compilation_time_metrics

    return float(sum(compilation_time_metrics.get("async_compile.wait", ())))


def kernel_nodes() -> dict[str, list[str]]:
    """ "kernel:number" -> names of the nodes that it computes, for the graph that Inductor compiled last: numbers count
    the calls of kernels in the graph's code. {} outside of :func:`kernels_by_node`."""
    import torch._inductor.config as config
    from torch._inductor import debug

    if not config.get_config_copy().get("trace.provenance_tracking_level"):
        return {}
    kernels = getattr(debug, "_inductor_triton_kernel_to_post_grad_node_info", {})
    return {name: list(nodes) for name, nodes in kernels.items() if name.rpartition(":")[2].isdigit()}
