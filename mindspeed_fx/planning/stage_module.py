"""The stages of an unmodified model as modules: the step is traced once, its graph cut, and each part compiled.

A module keeps one :class:`Program` for each kind of call, of which the first is traced where the stages are made; sizes
or a mode (``train()``, ``eval()``) that come later are traced from the model, as long as there is one.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import nn

from mindspeed_fx import torch_compile
from mindspeed_fx.backend import Compilation
from mindspeed_fx.compat import fx_graph, tracing
from mindspeed_fx.compat.graph_inputs import device_of
from mindspeed_fx.options import Options
from mindspeed_fx.planning.layer_lists import layers_of
from mindspeed_fx.planning.split_stages import Part, is_parameter, receivable, split_stages, tied_parameters
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.training.accumulation import rows_of
from mindspeed_fx.training.late_gradients import Late, Queue

PartOf = Callable[[torch.Tensor], torch.Tensor]
Kind = tuple
"""What tells one kind of call from another: the mode, and sizes and types of all arguments (values of others)."""


@dataclass
class Program:
    """One stage, compiled for one kind of call."""

    run: Callable
    inputs: list[Callable[[dict[str, Any]], Any]] = field(default_factory=list)
    """What each input of the graph is, of the model's arguments: parameters, buffers, arguments, constants."""
    received: tuple[torch.Tensor, ...] = ()
    returned: tuple[torch.Tensor, ...] = ()
    """Tensors on the meta device like those that come and go."""


class Stage(nn.Module):
    """Consecutive layers of a model, compiled; parameters and buffers are the model's own, under their names.

    ``stage(*received, **arguments of the model)`` for one microbatch: the tensors that the stage before returned, then
    the model's own arguments (those that this stage does not read are ignored; the first stage takes them by position
    too). Returns what the next stage receives; the last one what the model returns, as one tensor or a tuple, numbers
    as tensors [1].
    """

    def __init__(self, index: int, stages: int, trace: Trace):
        super().__init__()
        self._index, self._stages, self._trace = index, stages, trace
        self._programs: dict[Kind, Program] = {}
        self._kind: Kind | None = None
        self.late = Queue()
        """Gradients of weights that a schedule makes later than those of the stage's input."""
        self.late.in_parts = False
        self.tied: dict[str, list[int]] = {}
        """Parameter -> the stages that have it too, this one among them."""
        self.train(trace.mode())

    def take(self, kind: Kind, program: Program) -> None:
        self._programs[kind], self._kind = program, kind

    def select(self, arguments: dict[str, Any]) -> bool:
        """Be the stage of these arguments of a microbatch, and of the mode that the module is in; whether the arguments
        have other sizes than before.

        Raises:
            ShardingError: a kind that is new, and the model is gone; arguments that are missing.
        """
        before, kind = self._kind, self._trace.kind(arguments, self.training)
        if kind not in self._programs:
            self._trace.run(arguments, self.training)
        self._kind = kind
        return before is None or before[1:] != kind[1:]

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model, all by name."""
        return {**kwargs, **dict(zip(self._trace.names, args))}

    def bind(self, program: Program, value: Any, parameter: str | None, buffer: str | None, input: str | None) -> None:
        """One more input of a program: a parameter, a buffer, an argument of the model, or a constant."""
        if (name := parameter if parameter is not None else buffer) is not None:
            owner, last = add_under(self, name, value)
            program.inputs.append(lambda arg: getattr(owner, last))
        elif (name := input) is not None:
            shape = tuple(value.shape)
            program.inputs.append(lambda arg: self._argument(arg, name, shape))
        else:
            program.inputs.append(lambda arg: value)

    def _argument(self, arguments: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
        if name not in arguments:
            raise ShardingError(
                f'stage {self._index} of {self._stages} reads the model\'s argument "{name}", which is missing: give '
                f"every rank all of them by name, schedule.step({name}=...)"
            )
        if tuple(arguments[name].shape) != shape:
            raise ShardingError(
                f'stage {self._index} of {self._stages}: "{name}" is {tuple(arguments[name].shape)}; microbatches of '
                f"{shape} were traced: give the schedule and pipeline_stages the same batch and number of "
                "microbatches, or let it take others: mindspeed_fx.follow_shapes(schedule)"
            )
        return arguments[name]

    def forward(self, *received: Any, **arguments: Any) -> Any:
        if not self._index:
            arguments.update(zip(self._trace.names, received))
            received = ()
        if self._kind is not None and self._kind[0] != self.training:
            self.select(arguments)
        program = self._programs[self._kind]
        if len(received) != len(program.received):
            raise ShardingError(
                f"stage {self._index} of {self._stages} receives {len(program.received)} tensors, and got "
                f"{len(received)}"
            )
        out = program.run(*(value(arguments) for value in program.inputs), *received)
        if not torch.is_grad_enabled():  # AOTAutograd makes a graph all the same (2.13)
            out = [t.detach() for t in out]
        if self._index == self._stages - 1:
            out = [t.reshape(1) if t.dim() == 0 else t for t in out]
        return out[0].contiguous() if len(out) == 1 else tuple(t.contiguous() for t in out)

    def examples(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Tensors on the meta device like those that come and go, for ``PipelineStage``."""
        program = self._programs[self._kind]
        return program.received, program.returned


def add_under(module: nn.Module, name: str, value: torch.Tensor) -> tuple[nn.Module, str]:
    """Have ``module`` own a parameter or buffer under a name with dots; returns its owner, and its name there."""
    owner, last = module, name.rpartition(".")[2]
    for word in name.split(".")[:-1]:
        if word not in owner._modules:
            owner.add_module(word, nn.Module())
        owner = owner._modules[word]
    if isinstance(value, nn.Parameter):
        owner.register_parameter(last, value)
    else:
        owner.register_buffer(last, value)
    return owner, last


class _Traced(Exception):
    """Ends the run of the traced model before it starts."""


class Trace:
    """From a model and arguments of a microbatch to programs of some of its stages.

    Args:
        stages: how many the model has in all.
        layers: of each stage; None: as equal as can be.
        options: of the backend, with what a plan says of recomputation.
        only: numbers of the stages that are compiled.
        part_of: see :func:`stages`.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: int,
        options: Options,
        only: Sequence[int],
        layers: Sequence[int] | None = None,
        part_of: PartOf | None = None,
    ):
        self.part_of = part_of
        self.model, self.count, self.options, self.numbers = weakref.ref(model), stages, options, tuple(only)
        self.layers, self.sizes = layers_of(model, stages), layers
        self.names: list[str] = []
        self._stages: list[weakref.ref[Stage]] = []

    def make_stages(self) -> list[Stage]:
        """Once; whoever holds one holds no other."""
        stages = [Stage(s, self.count, self) for s in self.numbers]
        self._stages = [weakref.ref(s) for s in stages]
        return stages

    @property
    def stages(self) -> list[Stage]:
        return [stage for ref in self._stages if (stage := ref()) is not None]

    def mode(self) -> bool:
        model = self.model()
        return model is None or model.training

    def kind(self, arguments: dict[str, Any], training: bool) -> Kind:
        """
        Raises:
            ShardingError: arguments that are missing.
        """
        if missing := [n for n in self.names if n not in arguments]:
            raise ShardingError(
                f"the model's arguments {', '.join(missing)} are missing: give every rank all of them by name, "
                f"schedule.step({missing[0]}=...)"
            )
        values = [(n, arguments[n]) for n in self.names or arguments]
        return training, *(
            (n, tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else (n, repr(v)) for n, v in values
        )

    def run(self, arguments: dict[str, Any], training: bool) -> None:
        """Trace and compile for these arguments of a microbatch: one more program of every stage.

        Raises:
            ShardingError: the model is gone; an argument that holds tensors; see :func:`mindspeed_fx.pipeline_stages`.
        """
        model = self.model()
        if model is None:
            raise ShardingError(
                "the model that these stages were cut from is gone, and its arguments have other sizes, or the stages "
                "another mode: keep the model where they change"
            )
        self.names = self.names or list(arguments)
        arguments = {n: _own(n, arguments[n]) for n in self.names}
        kind = self.kind(arguments, training)
        inputs = {id(value): name for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        wrong: list[BaseException] = []
        modes, gradients = [(m, m.training) for m in model.modules()], [(p, p.grad) for p in model.parameters()]

        def backend(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable:
            try:
                compiled, tied = self._compile(gm, fakes)
            except Exception as e:
                wrong.append(e)
                raise
            numbers = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}

            def run(*values: Any) -> Any:
                parameters = {id(p): n for n, p in model.named_parameters()}
                buffers = {id(b): n for n, b in model.named_buffers()}
                for stage, (part, program) in zip(self.stages, compiled):
                    for n in part.inputs:
                        value = values[numbers[n]]
                        stage.bind(program, value, *(t.get(id(value)) for t in (parameters, buffers, inputs)))
                        if n in tied:
                            stage.tied[parameters[id(value)]] = tied[n]
                    stage.take(kind, program)
                raise _Traced

            return run

        torch._dynamo.reset()  # a graph of this code with other sizes would make Dynamo's sizes symbols
        try:
            if model.training != training:
                model.train(training)
            for p, _ in gradients:  # Dynamo would make fake tensors of them, and cannot of one that is being summed
                p.grad = None
            with torch.enable_grad(), tracing.in_one_graph(ShardingError, "pipeline_stages"):
                torch_compile.compile_with_backend(model, backend=backend, fullgraph=True, dynamic=False)(**arguments)
        except _Traced:
            pass
        except Exception:
            if wrong:
                raise wrong[0] from None
            raise
        finally:
            for module, mode in modes:
                module.training = mode
            for p, gradient in gradients:
                p.grad = gradient
            torch._dynamo.reset()

    def _compile(
        self, gm: fx.GraphModule, fakes: Sequence[Any]
    ) -> tuple[list[tuple[Part, Program]], dict[fx.Node, list[int]]]:
        """Programs of the stages, and parameters of several stages -> these stages."""
        numbers = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
        parts = split_stages(gm, self.layers, self.count, self.sizes)
        results = [fx_graph.example_value_of(n) for n in next(iter(gm.graph.find_nodes(op="output"))).args[0]]
        if not results or not all(isinstance(t, torch.Tensor) for t in results):
            raise ShardingError("the model returns what is no tensor; a pipeline's last stage returns tensors")
        compiled = []
        divided = [any(is_parameter(n) for n in part.inputs) for part in parts]  # without any, a plan says nothing
        for stage in self.stages:
            part, s = parts[stage._index], stage._index
            incoming, outgoing = self._between(divided[s - 1 : s + 1]), self._between(divided[s : s + 2])
            examples = [
                *(fakes[numbers[n]] for n in part.inputs),
                *(incoming(receivable(fx_graph.example_value_of(n))) for n in part.received),
            ]
            program = Program(lambda: None)
            weights = [i for i, n in enumerate(part.inputs) if is_parameter(n) and examples[i].requires_grad]
            compilation = Compilation(self.options.resolve(device_of(examples)))
            held = functools.partial(_values_of, program, weights)
            compilation.marks.late = Late(stage.late, weights, held, may_be_whole=True)
            if compilation.caches:
                compilation.record.effective["caches"] = "Inductor's alone: a stage's backward may come in parts"
            compilation.between = incoming is not _whole, outgoing is not _whole
            program.run = compilation.compile(part.gm, examples)
            program.received = tuple(_on_meta(x) for x in examples[len(part.inputs) :])
            last = s == self.count - 1
            sent = results if last else [outgoing(fx_graph.example_value_of(n)) for n in part.sent]
            program.returned = tuple(_on_meta(t.reshape(1) if last and t.dim() == 0 else t) for t in sent)
            compiled.append((part, program))
        return compiled, tied_parameters(parts)

    def _between(self, divided: list[bool]) -> PartOf:
        """What goes between two stages of what they compute, whether a plan divides each; there is no second one at the
        ends of the pipeline."""
        return self.part_of if self.part_of is not None and len(divided) == 2 and all(divided) else _whole


def _own(name: str, value: Any) -> Any:
    """An argument of a trace: each a tensor of its own, for Dynamo makes one input of one that comes twice.

    Raises:
        ShardingError: tensors inside of it, which the graph would hold as they are now.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if any(isinstance(x, torch.Tensor) for x in torch.utils._pytree.tree_leaves(value)):
        raise ShardingError(
            f'argument "{name}" is a {type(value).__name__} that holds tensors; stages take tensors as arguments with '
            "names of their own"
        )
    return value


def _values_of(program: Program, positions: list[int]) -> list[torch.Tensor]:
    """The parameters at these positions among the inputs of a program."""
    return [program.inputs[i]({}) for i in positions]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)


def stages(
    model: nn.Module,
    count: int,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    microbatches: int = 1,
    options: dict[str, Any] | None = None,
    only: Sequence[int] | None = None,
    recompute: str | None = None,
    layers: Sequence[int] | None = None,
    part_of: PartOf | None = None,
) -> list[Stage]:
    """The stages of ``model``, or of them those with the numbers ``only``, compiled for microbatches of the batch in
    ``args``; ``recompute``: a plan's; ``layers``: of each stage; ``part_of``: of what stages send, where a plan divides
    them.

    Raises:
        ShardingError: see :func:`mindspeed_fx.pipeline_stages`.
    """
    trace = Trace(
        model,
        count,
        Options.parse(options).with_plan(recompute),
        range(count) if only is None else only,
        layers,
        part_of,
    )
    results = trace.make_stages()
    bound = inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    trace.run(
        {name: _rows(name, value, microbatches) for name, value in _bind_arguments(bound).items()}, model.training
    )
    return results


def _bind_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name.

    Raises:
        ShardingError: arguments without a name.
    """
    results: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ShardingError(f'the model takes "*{name}"; a pipeline needs arguments with names')
        results.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return results


def _rows(name: str, value: Any, microbatches: int) -> Any:
    """The first microbatch of an argument, as torch's schedules split it: along dimension 0."""
    return rows_of(name, value, microbatches, 0).clone() if isinstance(value, torch.Tensor) else value
