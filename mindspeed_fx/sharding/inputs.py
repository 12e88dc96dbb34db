"""What callers pass to a parallelized model: the whole batch on every rank, or each rank its own part.

``inputs="whole"``: every rank passes the same values, and takes its part. ``inputs="local"``: an argument is the part
that the plan gives this rank; a hook in front of ``forward`` shows it whole (:func:`whole_input`), and the backend cuts
that call out of the graph, as it does for parameters (``parallelized_graph.py``). Either way the first step with new
sizes compares the ranks (:class:`InputCheck`):

    plan zero2+tp, mesh dp 2 x tp 2, ids [4, 16] divided along 0 over dp       rank    0      1      2      3
    whole: all bytes alike over dp and tp                                              0..3   0..3   0..3   0..3
    local: all bytes alike over tp, as many rows over dp                               0..1   0..1   2..3   2..3
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from mindspeed_fx.compat import distributed, dtensor, tracing
from mindspeed_fx.compat.fake import hint
from mindspeed_fx.report.source import source_line
from mindspeed_fx.sharding.plan import ShardingError, placement_of
from mindspeed_fx.sharding.registry import WHOLE, WHOLE_INPUT, shows_whole
from mindspeed_fx.sharding.spmd.redistribute import placements_of

COMPARED = 64
"""Arguments that are compared one by one; those behind are compared together."""

ALONE_AFTER = 30.0
"""Seconds that a rank with new sizes, compiled and ready to compare, waits for the others to begin to compile: as long
as ranks may come to one step after another, a slow step of a data loader included."""


def argument_placements(sharding: Any, name: str, x: torch.Tensor) -> tuple[Placement, ...]:
    """Where the plan has an argument of the model, by its name."""
    where = f'plan "{sharding.plan.name}", input "{name}" of shape {tuple(x.shape)}'
    return placements_of(placement_of(sharding.plan.inputs, name, "input"), sharding.mesh, x.ndim, where)


@shows_whole(WHOLE_INPUT)
def whole_input(x: torch.Tensor, key: str) -> torch.Tensor:
    """An argument of which every rank passes its part, whole; the backend knows the call by its key.

    Args:
        x: [..., n / ranks, ...], contiguous parts in the order of the mesh.
        key: "number of the sharding:name".
    """
    from mindspeed_fx.sharding.registry import SHARDINGS

    number, _, name = key.partition(":")
    sharding = SHARDINGS[int(number)]
    placements = argument_placements(sharding, name, x)
    return DTensor.from_local(x.contiguous(), sharding.mesh, placements, run_check=False).full_tensor()


def show_inputs_whole(model: nn.Module, number: int) -> None:
    """Make ``model`` take each rank's part of its tensor arguments, also of those in lists, tuples and dictionaries."""
    names, rest = argument_names(model.forward)
    prefix = f"{number}:"  # a number would be a symbol with dynamic=True

    def show(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        arguments = [*names[: len(args)], *(f"{rest}_{i}" for i in range(len(args) - len(names)))]
        by_name = {name: _each(x, name.lower(), prefix) for name, x in kwargs.items()}
        return tuple(_each(x, name, prefix) for x, name in zip(args, arguments)), by_name

    model.register_forward_pre_hook(show, with_kwargs=True)


def argument_names(function: Callable) -> tuple[list[str], str]:
    """Names of positional arguments, and of those that ``*args`` takes."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name.lower() for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, next((p.name.lower() for p in parameters if p.kind is p.VAR_POSITIONAL), "args")


def _each(x: Any, name: str, prefix: str) -> Any:
    if isinstance(x, torch.Tensor):
        return whole_input(x, prefix + name)
    if type(x) in (list, tuple):
        return type(x)([_each(v, f"{name}_{i}", prefix) for i, v in enumerate(x)])
    if type(x) is dict:
        return {k: _each(v, f"{name}_{k}".lower(), prefix) for k, v in x.items()}
    return x


def is_cut_outside(node: fx.Node, x: Any, value: Any, result: Any) -> bool:
    """Whether an argument that is passed whole is cut to this rank's part before the compiled program, which then is
    the same on every rank that differs in nothing else: contiguous, of a size that ranks share evenly (a guard where
    it is a symbol), not written, and without a gradient.

    Args:
        node: its placeholder.
        value: how the program takes it.
    """
    from mindspeed_fx.sharding.spmd.padded import dims_in_chunks

    if value is None or value.parameter or value.part or not isinstance(x, torch.Tensor) or x.requires_grad:
        return False
    mesh = result.sharding.mesh
    divided = [(i, p.dim) for i, p in enumerate(value.placements) if p.is_shard()]
    if not divided or node.meta.get("mutated") or dims_in_chunks(result.plan, mesh):
        return False
    ranks = {d: math.prod(mesh.size(i) for i, other in divided if other == d) for _, d in divided}
    return x.is_contiguous() and all(x.shape[d] % n == 0 and x.shape[d] > 0 for d, n in ranks.items())


def own_part(x: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of ``x``, contiguous and in memory of its own: a view's place in the whole would be told to the
    compiler, and ranks would plan with other bytes and order their collectives otherwise.
    """
    for i, p in enumerate(placements):
        if p.is_shard():
            size = x.shape[p.dim] // mesh.size(i)
            x = x.narrow(p.dim, mesh.get_coordinate()[i] * size, size)
    return x.clone(memory_format=torch.contiguous_format)


@dataclass
class Argument:
    """A tensor that callers pass."""

    position: int
    """Among the inputs of the graph."""
    name: str
    placements: Sequence[Placement]
    """Of what is passed: whole everywhere, or the parts that the plan names."""


@dataclass(frozen=True)
class Comparison:
    """What is compared of the arguments of a graph."""

    arguments: list[Argument]
    layouts: list[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of each argument in the step that was compiled."""
    changing: bool
    """Whether one program runs on several sizes, each of which is compared when it is new."""
    random_call: str
    """A call that draws random numbers, with its line: then the generators of all ranks are compared too; "": none."""


def comparison_of(arguments: list[Argument], examples: Sequence[Any], random_call: fx.Node | None = None) -> Comparison:
    """
    Args:
        examples: inputs of the graph.
        random_call: it draws random numbers.
    """
    sizes = [n for a in arguments for n in examples[a.position].shape]
    call = ""
    if random_call is not None:
        line = source_line(random_call)
        call = f"{random_call.target}" + (f", {line}," if line else "")
    changing = any(isinstance(n, torch.SymInt) for n in sizes)
    return Comparison(arguments, _layouts(arguments, examples), changing, call)


def _layouts(arguments: list[Argument], inputs: Sequence[Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Of symbolic sizes those of the step that is compiled."""
    tensors = [(a.name, inputs[a.position]) for a in arguments]
    return [(name, tuple(map(hint, x.shape)), str(x.dtype)) for name, x in tensors]


class InputCheck:
    """``check(inputs of the graph)`` compares the arguments of all ranks, once per set of names, shapes and dtypes.

    Every rank comes here in the same step: with sizes that are new to its model. No collective runs in other steps.
    A rank to which sizes are new while the others go on would wait in its collectives until they time out. So each rank
    writes to the process group's store when it begins to compile for new sizes, and behind the first step, for which
    ranks may start minutes apart, looks whether the others did.
    """

    def __init__(self, sharding: Any, comparison: Comparison):
        self.sharding, self.arguments, self.random_call = sharding, comparison.arguments, comparison.random_call
        self.changing, self.layouts = comparison.changing, comparison.layouts
        self.done = not sharding.check_inputs or not self.arguments or sharding.mesh.size() == 1
        store = None if self.done or dtensor.local_tensor_mode() is not None else distributed.default_store()
        self.store = store
        if store is not None and tuple(self.layouts) not in sharding.checked:
            store.set(self._key(distributed.rank()), "compiles")

    def __call__(self, inputs: Sequence[Any]) -> None:
        """
        Raises:
            ShardingError: on all ranks, with the argument's name.
        """
        if self.done:
            return
        if self.changing:
            self.layouts = _layouts(self.arguments, inputs)
        if tuple(self.layouts) in self.sharding.checked:
            return
        tensors = [inputs[a.position] for a in self.arguments]
        if any(x.is_meta or tracing.is_fake(x) for x in tensors):
            return
        self._wait_for_others()
        layouts, values, generators = self._unlike(tensors)
        if layouts is not None:
            raise ShardingError(self._sizes_differ(layouts))
        if values is not None:
            raise ShardingError(self._values_differ(values))
        if generators is not None:
            raise ShardingError(self._generators_differ())
        self.done = not self.changing
        self.sharding.checked.add(tuple(self.layouts))

    def _key(self, rank: int) -> str:
        """Of a rank that compiles for its so many-th sizes; models are numbered alike on every rank."""
        return f"mindspeed_fx/inputs/{self.sharding.number}/{len(self.sharding.checked)}/{rank}"

    def _wait_for_others(self) -> None:
        """
        Raises:
            ShardingError: on this rank, after ``ALONE_AFTER`` seconds, with the ranks to which no sizes are new.
        """
        if self.store is None or not self.sharding.checked:
            return
        self.store.set(self._key(distributed.rank()), "compares")  # compiled in a step that was refused
        ranks, end = self.sharding.mesh.mesh.flatten().tolist(), time.monotonic() + ALONE_AFTER
        while missing := [r for r in ranks if not self.store.check([self._key(r)])]:
            if time.monotonic() > end:
                own = ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in self.layouts[:COMPARED])
                raise ShardingError(
                    f"rank {distributed.rank()} got arguments of new sizes ({own}) in a step in which no sizes are new "
                    f'to {_shown_ranks(missing)}: all ranks of plan "{self.sharding.plan.name}" pass tensors of the '
                    f"same sizes in the same step{self._part_expected()}; waited for {ALONE_AFTER:g} s"
                )
            time.sleep(0.01)

    def _unlike(self, tensors: list[torch.Tensor]) -> list[int | None]:
        """The first argument with other sizes on some rank; the first with other values where ranks pass the same; and
        0 where the generator of random numbers is another's."""
        mesh: DeviceMesh = self.sharding.mesh
        count = COMPARED + 1
        layout_digests = _fold_digests([_digest(repr(layout).encode()) for layout in self.layouts])
        state = [] if not self.random_call else [_digest(_bytes(dtensor.random_state(mesh.device_type)))]
        generator = _fold_digests(state)
        differ = None
        for dim in range(mesh.ndim):
            alike = [not a.placements[dim].is_shard() for a in self.arguments]

            def digests(*parts: torch.Tensor) -> torch.Tensor:
                values = _fold_digests([_digest(_bytes(x)) if same else 0 for x, same in zip(parts, alike)])
                rows = torch.tensor([layout_digests, values, generator], dtype=torch.int64)
                return torch.stack([rows, -rows]).to(mesh.device_type)

            own = dtensor.on_each_rank(digests, *tensors)
            least = dtensor.all_reduce(own, mesh, [dim], "min")
            unlike = (least[0] != -least[1]).to(torch.int64)
            differ = unlike if differ is None else differ | unlike
        everywhere = dtensor.all_reduce(differ, mesh, range(mesh.ndim), "max")
        flags = dtensor.reconcile(everywhere).tolist()
        return [next((i for i in range(count) if row[i]), None) for row in flags]

    def _named(self, index: int) -> str:
        if index >= min(COMPARED, len(self.arguments)):
            return f"one of the arguments from the {COMPARED}th on"
        return f'argument "{self.arguments[index].name}"'

    def _own(self, index: int) -> str:
        return f" (here {self.layouts[index][1]}, {self.layouts[index][2]})" if index < len(self.layouts) else ""

    def _sizes_differ(self, index: int) -> str:
        who = f"{self._named(index)}{self._own(index)} has another shape or dtype on another rank"
        if self.sharding.inputs == WHOLE:
            return f"{who}; {self._whole_expected()}"
        return f'{who}: parts are uneven, under plan "{self.sharding.plan.name}"{self._part_expected()}'

    def _values_differ(self, index: int) -> str:
        who = f"{self._named(index)}{self._own(index)} has other values on another rank"
        if self.sharding.inputs == WHOLE:
            return f"{who}; {self._whole_expected()}"
        plan = f'plan "{self.sharding.plan.name}"'
        share = "ranks that share a part (those of tensor parallelism) pass the same"
        return f"{who}, where {plan} does not divide it: {share}"

    def _generators_differ(self) -> str:
        plan = f'plan "{self.sharding.plan.name}"'
        same = "every rank draws for the whole and keeps its part; call torch.manual_seed with one seed on every rank"
        return f"{self.random_call} draws random numbers, and the generators of the ranks differ: under {plan} {same}"

    def _part_expected(self) -> str:
        if self.sharding.inputs == WHOLE:
            return ""
        return '; with inputs="local" all ranks pass parts of one size: pad them, or leave the rest out'

    def _whole_expected(self) -> str:
        same = f'under plan "{self.sharding.plan.name}" every rank passes the same whole tensor'
        return f'{same}; to pass each rank\'s own part: parallelize(..., inputs="local")'


def _shown_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (", ..." if len(ranks) > 8 else "")


def _fold_digests(digests: list[int]) -> list[int]:
    """``COMPARED`` numbers, and one for all that are behind."""
    rest = _digest(repr(digests[COMPARED:]).encode())
    return digests[:COMPARED] + [0] * (COMPARED - len(digests)) + [rest]


def _digest(data: Any) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def _bytes(x: torch.Tensor) -> Any:
    whole = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy()
