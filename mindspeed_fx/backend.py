"""What happens, in order, when ``torch.compile(model, backend="mindspeed")`` calls us.

    Dynamo graph -> capture -> captured passes -> AOTAutograd -> joint passes -> cut -> partitioned passes -> lowering
    -> codegen

Of layers that are alike five go this way up to codegen (:mod:`mindspeed_fx.partition.shorten`). With codegen "inductor"
the steps sit in Inductor's hooks (one composite object per hook, known to its caches by :func:`identity`); with "eager"
the same steps run around AOTAutograd alone.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx import host_heap
from mindspeed_fx.capture import CaptureError, capture, explain_unread, isolate, keeps_writes
from mindspeed_fx.capture.regions import inline_regions
from mindspeed_fx.compat import (
    alike_layers,
    aot_inputs,
    bisector,
    distributed,
    dynamo,
    fake,
    fx_graph,
    graph_inputs,
    inductor_cache,
    npu,
    permuted_writes,
    unread_regions,
)
from mindspeed_fx.compat import inductor as inductor_compat
from mindspeed_fx.cost.hardware import detect
from mindspeed_fx.cost.read import read
from mindspeed_fx.errors import OptionError
from mindspeed_fx.garbage import without_collection
from mindspeed_fx.hooks import CapturedPasses, identity
from mindspeed_fx.kernels.lower import lower
from mindspeed_fx.kernels.npu import acl_graph
from mindspeed_fx.layers import leave_out
from mindspeed_fx.options import Options
from mindspeed_fx.partition import selected, written_inputs, zeros
from mindspeed_fx.partition.order import prepare_early
from mindspeed_fx.partition.partitioner import Partitioner
from mindspeed_fx.partition.shorten import Shortened
from mindspeed_fx.partition.stretch import LayersDiffer
from mindspeed_fx.partition.unroll import unroll
from mindspeed_fx.passes import overlap
from mindspeed_fx.passes.overlap.model.step_lanes import record_lanes
from mindspeed_fx.passes.runner import Pipeline
from mindspeed_fx.reading import beside_reading, may_be_read_once
from mindspeed_fx.report import progress, recorder
from mindspeed_fx.report.code import remembering
from mindspeed_fx.sharding import parallelized_graph as sharding
from mindspeed_fx.training import flop_count, late_gradients
from mindspeed_fx.training.marks import Marks


def mindspeed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable:
    """The ``torch.compile`` backend.

    Args:
        gm: Dynamo graph.
        example_inputs: fake inputs.
        options: see :class:`mindspeed_fx.options.Options`; the environment fills in the rest.
        mode: refused; Inductor's settings go through ``options["inductor"]``.

    Raises:
        OptionError: a bad option, or an unknown pass name.
        PassError, CheckError: a pass broke its contract, or rewrote nothing under ``strict``.
    """
    if mode not in (None, "default"):
        raise OptionError(
            f'mode={mode!r} is not supported by the mindspeed backend; give options={{"inductor": {{...}}}} instead'
        )
    dynamo.while_compiling(mindspeed, beside_reading)
    resolved = Options.parse(options).resolve(graph_inputs.device_of(example_inputs))
    is_meta = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)} == {"meta"}
    try:
        return Compilation(resolved, is_meta, whole="").compile(gm, example_inputs)
    except LayersDiffer as difference:  # of the graphs that were traced from a few of the layers
        why = str(difference)
    return Compilation(resolved, is_meta, whole=why).compile(gm, example_inputs)


class Compilation:
    """One Dynamo graph on its way; holds what the hooks share."""

    def __init__(self, options: Options, is_meta: bool = False, whole: str = "not compiled by torch.compile alone"):
        self.options = options
        self.whole = whole
        """Why every layer is traced; empty where some may be copies of others."""
        self.shortened: Shortened | None = None
        self.generates = options.codegen == "inductor" and not is_meta
        """False on the meta device too: before it calls passes, Inductor leaves empty outputs of such a graph alone."""
        self.marks = Marks()
        self.between = False, False
        """Of a parallelized stage of a pipeline: whether it receives parts, and sends them."""
        self.sharding: Any = None
        """Of a parallelized model: its :class:`mindspeed_fx.sharding.parallelized_graph.ParallelizedGraph`."""
        self.pipeline = Pipeline(options)
        why = recorder.why_uncached(options, is_meta)
        self.caches = not why
        effective = {
            **options.as_dict(),
            "hardware": options.hardware or f"none: {detect(options.target)[1]}",
            "passes": [p.name for p in self.pipeline.passes],
            "caches": "on" if self.caches else f"off: {', '.join(why)}",
        }
        self.record = recorder.begin(options.as_dict(), effective, distributed.rank())
        self.work: dict[str, flop_count.Work] = {}
        """Option "count_flops": of the joint graph, and of forward and backward."""
        self.readable = remembering() if recorder.wants_text(options.as_dict()) else None

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        try:
            with self._timed("compile"), self._progress(), without_collection(), fake.remembering_calls():
                copy = graph_inputs.copy_dynamo_graph(gm)
                if regions := inline_regions(copy):
                    self.record.effective["regions"] = regions
                permuted_writes.write_by_copy(copy)
                compiled = self._compile(copy, inputs)
                graph_inputs.drop_owner(copy)
        except BaseException:
            recorder.discard(self.record)
            raise
        recorder.finish(self.record)
        return compiled

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        if self.options.target == "cpu":
            host_heap.keep()
        if plan := sharding.take_shown_calls(gm):
            self.sharding, plan.between = plan, self.between
            self._take_recompute(plan.plan)
            sharding.check_options(self.options)
        inputs = self.marks.take(gm, inputs, self.options)
        inputs, self.shortened = leave_out(self, gm, inputs)
        table = None
        if self.options.target == "npu":
            npu.accept_aliases()
            table = npu.decompositions()
        if self.options.codegen == "npugraph_ex" and (why := npu.problem()):
            raise OptionError(f'option "codegen" is "npugraph_ex": {why}')
        short = self.shortened.identity if self.shortened else ""
        name = identity(self.options) + self.marks.identity + short
        # A plan's local program is traced from the captured graph, so that capture can't wait for Inductor's hook.
        captured_by_hook = CapturedPasses(self.capture, gm, name) if self.generates and not plan else None
        if captured_by_hook is None:
            with sharding.reading_loops(plan.sharding if plan else None):
                self.capture(gm)
        with sharding.tracing(plan):
            return self._compile_captured(gm, inputs, plan, captured_by_hook, name, table)

    def _compile_captured(
        self, gm: fx.GraphModule, inputs: Sequence[Any], plan: Any, captured_by_hook: Any, name: str, table: Any
    ) -> Callable:
        """From the captured graph on; of a parallelized model the local program is traced here."""
        gm, inputs, localized = sharding.localize(gm, inputs, plan)
        recorder.note_inputs(self.record, inputs)

        def wrap(compiled: Callable) -> Callable:
            return self.marks.wrap(localized(compiled))

        if not self.generates:
            how = {"decompositions": table, "keep_writes": keeps_writes(gm)}
            inner, partition = self.run_eagerly, self.partitioner()
            return wrap(inductor_compat.compile_without_codegen(gm, inputs, inner=inner, partition=partition, **how))
        if self.options.target == "npu":
            npu.load_inductor()
        pinned, config = overlap.inductor_settings(self.pipeline.passes, dict(self.options.inductor), name)
        # a rank's part of a table may be one number throughout where another rank's is not, and then only one of them
        # would be folded
        if plan:
            config["joint_graph_constant_folding"] = False
        hooks = {"pre_grad": captured_by_hook, "partitioner": self.partitioner(name), "post_grad": pinned}
        return wrap(
            inductor_compat.compile_with_inductor(
                gm,
                inputs,
                inner=self.run_inductor,
                config=config,
                caches=self.caches and (plan is None or plan.is_cacheable),
                joint_cache=self.marks.late is None,
                decompositions=table,
                **hooks,
            )
        )

    def _take_recompute(self, plan: Any) -> None:
        """What a plan says of recomputation becomes the option, unless the user's options decide it."""
        if (options := self.options.with_plan(plan.recompute)) is not self.options:
            self.options, self.pipeline = options, Pipeline(options)
            self.record.effective["recompute"] = f"{plan.recompute}, by the plan"

    # ---------------------------------------------------------------- the steps

    def capture(self, gm: fx.GraphModule) -> str | None:
        """Dynamo graph -> canonical graph with the captured passes applied, in place.

        Returns the reason where the graph stays as it is, None otherwise.
        """
        self._snapshot("dynamo", gm)
        progress.enter("capture")
        with self._timed("capture"):
            captured, reason = self._read(gm)
        if captured is None:
            self.pipeline.refuse("captured", reason, self.record)
            self.marks.read(gm)
            return reason
        self._snapshot("captured", captured, text=False)
        progress.enter("captured passes")
        with self._timed("passes"):
            self.pipeline.run("captured", "captured", captured, self.record, self.readable, self.sharding)
        fx_graph.replace_graph(gm, captured)
        graph_inputs.drop_owner(captured)
        self.marks.read(gm)
        return None

    def _read(self, gm: fx.GraphModule) -> tuple[fx.GraphModule | None, str]:
        """The canonical graph, or the reason why there is none; AOTAutograd then gets Dynamo's graph as it is."""
        planned = self.sharding is not None
        if reason := isolate(gm) or (None if planned else explain_unread(gm)):
            return None, reason
        try:
            return capture(gm), ""
        except Exception as error:
            if planned:
                raise
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            check = self.options.check
            asked = "strict" if self.options.strict else f'check="{check}"' if check != "off" else None
            if asked and not isinstance(error, CaptureError):  # which says what a graph does that is not captured
                raise CaptureError(
                    f"{asked}: the graph cannot be traced as operators on plain tensors ({why})"
                ) from error
            return None, f"the graph cannot be traced as operators on plain tensors, and is not captured ({why})"

    def prepare_joint(self, joint: fx.GraphModule) -> None:
        """Joint passes; then inline what has no kernel of its own, so that the cut can look inside."""
        if self.sharding is not None:
            self.sharding.program.traffic.traced()
        self.marks.mark(joint)
        written_inputs.keep_old_values(joint)
        zeros.fill_zeros(joint)
        progress.enter("joint passes")
        with self._timed("passes"):
            self.pipeline.run("joint", "joint", joint, self.record, self.readable, self.sharding)
        if self.options.count_flops:
            self.work["joint"] = flop_count.count(joint)
        if self.options.codegen == "inductor":
            with self._timed("lowering"):
                self.record.lowered += lower(
                    joint,
                    self.options.target,
                    "joint",
                    inline_references=True,
                    kernels=False,
                    decompositions=inductor_compat.inductor_decompositions(),
                )
            selected.keep_sources(joint)

    def partitioner(self, name: str = "") -> Partitioner:
        """Cuts a joint graph into forward and backward, as the passes of stage "partition" decide."""
        return Partitioner(
            self.prepare_joint, self.decide, self.after_cut, self.options.memory_budget, name, self.shortened
        )

    def decide(self, graph: fx.Graph, nodes: Any) -> list[fx.Node] | None:
        """What the forward saves; under a budget, what prepares the backward runs where its inputs are made."""
        progress.enter("planning")
        if self.options.memory_budget is not None:
            prepare_early(graph, nodes)
        return self.pipeline.decide(self.record, graph, nodes)

    def after_cut(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Copies to host memory and back of what the passes of stage "partition" move there; masks as bytes. Sides that
        lack layers are finished here, before they get them."""
        if self.options.count_flops:
            self.work["forward"] = work = flop_count.count(forward)
            self.work["backward"] = flop_count.behind(self.work["joint"], work, flop_count.count(backward))
        self.pipeline.after_cut(self.record, forward, backward)
        if self.shortened is not None:
            self.finish_side(forward, "forward")
            self.finish_side(backward, "backward")

    def finish_side(self, gm: fx.GraphModule, side: str) -> None:
        """Partitioned passes and lowering of one forward, backward or inference graph."""
        inductor = self.options.codegen == "inductor"
        if self.sharding is not None and self.generates:
            self.sharding.rename_groups(gm)
        if self.options.count_flops and side not in self.work:
            self.work[side] = flop_count.count(gm)
        direction = "backward" if side == "backward" else "forward"
        progress.enter(f"{direction} passes")
        with self._timed("passes"):
            if side == "inference":
                self.pipeline.run("joint", side, gm, self.record, self.readable, self.sharding)
            self.pipeline.run("partitioned", side, gm, self.record, self.readable, self.sharding)
        progress.enter(f"{direction} lowering")
        with self._timed("lowering"):
            table = inductor_compat.inductor_decompositions() if inductor else None
            with acl_graph(self.options.codegen == "npugraph_ex"):
                self.record.lowered += lower(
                    gm, self.options.target, side, inline_references=inductor, decompositions=table
                )
        if side != "backward":
            self.marks.wait(gm)
        if self.options.count_flops:
            flop_count.insert(gm, self.work[side])
        self.pipeline.require_named(self.record, side)
        self._snapshot(side, gm)
        with self._timed("passes"):
            self.pipeline.run("lowered", side, gm, self.record, self.readable)
        recorder.finish(self.record)

    def _finished(self, gm: fx.GraphModule, inputs: Sequence[Any], side: str) -> tuple[Sequence[Any], list[int] | None]:
        """Finish a side, and give an inference graph the layers that it lacks; what it is compiled with, and which of
        that lies where it lay in every call, where that is another."""
        if self.shortened is None or side == "inference":
            with dynamo.alone():  # a backward is compiled when it is first called
                self.finish_side(gm, side)
        progress.enter("backward codegen" if side == "backward" else "forward codegen")
        if self.shortened is None or side != "inference":
            return inputs, None
        return unroll(gm, self.shortened, inputs), aot_inputs.static_inputs()

    def run_eagerly(self, gm: fx.GraphModule, inputs: Sequence[Any], side: str) -> Callable:
        with self._progress(), without_collection():
            inputs, _ = self._finished(gm, inputs, side)
        if self.options.codegen == "eager":
            fake.reshape_views(gm)
        if self.marks.late is not None and side == "backward":
            return late_gradients.run_in_parts(gm, self.marks.late, inductor_compat.box_arguments, self.marks.hand_over)
        self.marks.hand_over(gm)
        return npu.npugraph_ex(gm, inputs, self.options.npugraph_ex) if self.options.codegen == "npugraph_ex" else gm

    def run_inductor(self, gm: fx.GraphModule, inputs: Sequence[Any], compile: Callable, **kwargs: Any) -> Any:
        side = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        with self._progress(), without_collection():
            inputs, static = self._finished(gm, inputs, side)
            if static is not None:
                kwargs["static_input_idxs"] = static
            if recorder.is_modelling():
                return inductor_compat.box_arguments(gm)
            late = self.marks.late
            shared = self.caches and (self.sharding.is_cacheable if self.sharding else late is not None)
            if late is not None and side == "backward":
                later = inductor_compat.compile_later(compile, gm, inputs, kwargs)
                return late_gradients.run_in_parts(gm, late, inductor_cache.each_once(later, shared))
            with inductor_cache.compiled_once(gm, inputs, shared), recorder.record_codegen(self.record):
                compiled = compile(gm, inputs, **kwargs)
        self.record.kernels[side] = inductor_compat.kernel_nodes()
        return compiled

    def _timed(self, name: str) -> Any:
        return recorder.record_time(self.record, name)

    def _progress(self) -> Any:
        return progress.task(f"graph {self.record.index}", progress.COMPILE)

    def _snapshot(self, stage: str, gm: fx.GraphModule, text: bool = True) -> None:
        if self.readable is not None:
            self.record.stages.update({stage: self.readable(gm)} if text else {})
            self.record.calls.update({stage: read(gm)} if stage != "dynamo" else {})
            record_lanes(self.record, stage)


def _reads_once(compiler: Callable, layer: torch.nn.Module) -> bool:
    return dynamo.function_of(compiler) is mindspeed and may_be_read_once(dynamo.options_of(compiler), layer)


alike_layers.read_once(_reads_once)
bisector.register_bisector()
dynamo.keep_contexts_over_jumps()
dynamo.skip_guards_on_empty_hooks()
dynamo.tell_compiling_from_export()
dynamo.while_compiling(mindspeed, beside_reading)
unread_regions.guard()
