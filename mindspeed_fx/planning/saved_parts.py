"""What a file of :func:`mindspeed_fx.save_compiled` says of a parallelized model, whose program is one rank's alone.

Every rank writes a file of its own (:func:`file_of_rank`), and reads it in a later job. What the program was made for
(world size, rank, mesh, plan) is compared first; process groups are those of the job that runs it
(:func:`mindspeed_fx.compat.distributed.name_groups`), and so are the mesh and the classes that its guards compare.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from mindspeed_fx.compat import ahead_called, distributed
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.saved_file import StaleFile
from mindspeed_fx.planning.split_backward import SplitBackward
from mindspeed_fx.planning.stage_module import Stage
from mindspeed_fx.sharding.local_call import LocalCall, call_loaded
from mindspeed_fx.sharding.parallelize import showing
from mindspeed_fx.sharding.registry import Sharding

_live: list[Sharding] = []
"""Of the models that a step is given, while it is read."""


CONTENTS = "contents of the plan"


def file_of_rank(path: str | os.PathLike) -> str:
    """Where this rank's part of ``path`` lies: ``path.rank3``."""
    return f"{os.fspath(path)}.rank{distributed.rank()}"


def find_shardings(values: Sequence[Any]) -> list[Sharding]:
    """Of the parallelized models in ``values``: modules, in containers too, and attributes of objects.

    Raises:
        OptionError: a stage of a pipeline, or another module whose backward comes in parts.
    """
    result: list[Sharding] = []
    for module in (m for value in tree_leaves(list(values)) for m in _modules(value, depth=2)):
        if isinstance(module, (Stage, SplitBackward)):
            raise OptionError(
                f"save_compiled: a {type(module).__name__} compiles itself, and its backward in parts, which no file "
                "holds; a second start takes its graphs from Inductor's cache"
            )
        sharding = vars(module).get("_sharding")
        if isinstance(sharding, Sharding) and sharding not in result:
            result.append(sharding)
    return result


def _modules(value: Any, depth: int) -> Iterator[torch.nn.Module]:
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    elif depth and not isinstance(value, (type, torch.Tensor)) and not inspect.isroutine(value):
        for attribute in list(getattr(value, "__dict__", {}).values()):
            yield from _modules(attribute, depth - 1)


def as_writable(compiled: Any) -> Any:
    """What the backend made, as a file can hold it.

    Raises:
        OptionError: it cannot.
    """
    inner = compiled.compiled if isinstance(compiled, LocalCall) else compiled
    if not hasattr(inner, "serialize"):
        raise OptionError("save_compiled: functions of this process are called with its gradients, which no file holds")
    if not isinstance(compiled, LocalCall):
        return compiled
    if not compiled.is_cacheable:
        raise OptionError(
            "save_compiled: a process group of the mesh has symmetric memory, which is known by the group's own name, "
            "another one in every start"
        )
    return ahead_called.Called(inner, compiled.outside, compiled)


@contextlib.contextmanager
def guards_written(shardings: list[Sharding]) -> Iterator[None]:
    """Within, guards are written so that a mesh of ``shardings``, and classes of parallelized modules, are those of the
    process that reads them."""

    def reduce(value: Any) -> Any:
        if isinstance(value, DeviceMesh):
            number = next((i for i, s in enumerate(shardings) if s.mesh == value), None)
            return NotImplemented if number is None else (_live_mesh, (number,))
        if isinstance(value, type) and "_shown_from" in vars(value):
            return showing, value._shown_from  # type: ignore[attr-defined]
        return NotImplemented

    with ahead_called.guards_written_by(reduce):
        yield


def _live_mesh(number: int) -> Any:
    return _live[number].mesh


def describe(compiled: Any, shardings: list[Sharding]) -> dict[str, Any] | None:
    """What the file says of the plan; None where no model is parallelized.

    Raises:
        OptionError: a model that nothing a step is given holds; a plan without a text of its own.
    """
    called = ahead_called.called_of(compiled)
    if called is None:
        return None
    assert isinstance(called.outer, LocalCall)
    sharding = called.outer.check.sharding
    if sharding not in shardings:
        raise OptionError(
            "save_compiled: the parallelized model is neither an argument of the step nor a variable that it reads"
        )
    if re.search(r"\b0x[0-9a-f]{6,}", repr(sharding.plan)):
        raise OptionError(f'save_compiled: plan "{sharding.plan.name}" holds an object that no file can name')
    return {"which": shardings.index(sharding), **_place_of(sharding)}


def _place_of(sharding: Sharding) -> dict[str, Any]:
    assert sharding.mesh is not None
    return {
        "world size": distributed.world_size(),
        "rank": distributed.rank(),
        "plan": sharding.plan.name,
        "mesh": distributed.mesh_text(sharding.mesh),
        "place in the mesh": list(sharding.mesh.get_coordinate() or ()),
        CONTENTS: hashlib.sha256(repr(sharding.plan).encode()).hexdigest()[:16],
        "inputs": sharding.inputs,
    }


def compare_rank(parts: Mapping[str, Any] | None) -> None:
    """Before anything of the file is read: this process is the one that it was written for.

    Raises:
        StaleFile: it is not.
    """
    for name, now in (("world size", distributed.world_size()), ("rank", distributed.rank())):
        if parts is not None and parts.get(name) != now:
            raise StaleFile(f"{name} was {parts.get(name)} and is {now}")


def read(parts: Mapping[str, Any], shardings: list[Sharding], from_bytes: Callable[[], Any]) -> Any:
    """The compiled function, for the model that the step was given.

    Args:
        parts: what :func:`describe` wrote.
        shardings: of the models at hand.
        from_bytes: reads the file's program.

    Raises:
        StaleFile: another plan or mesh, or none.
    """
    which = parts.get("which")
    if not isinstance(which, int) or which >= len(shardings):
        raise StaleFile(f'the model was divided by plan "{parts.get("plan")}" and is whole')
    sharding = shardings[which]
    for name, now in _place_of(sharding).items():
        if parts.get(name) == now:
            continue
        if name == CONTENTS:
            raise StaleFile(f'plan "{sharding.plan.name}" has other contents than when the file was made')
        raise StaleFile(f"{name} was {parts.get(name)} and is {now}")
    _live[:] = shardings
    try:
        compiled = from_bytes()
    finally:
        _live.clear()
    called = ahead_called.called_of(compiled)
    if called is None:
        raise StaleFile("its program is none of a plan")
    called.call_by(lambda outside, inner: call_loaded(outside, sharding, inner))
    return compiled
