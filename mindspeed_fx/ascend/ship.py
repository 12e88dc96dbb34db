"""A model on its way to the process that has torch_npu: its structure without its values.

From Python a model is pickled with every tensor replaced by its description (shape, strides, type), so that no weight
is copied whatever the model's size; from a script, ``FUNCTION`` runs over there on the meta device. Either way
:func:`to_fake` then makes fake ``npu:0`` tensors of what the model holds.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import runpy
import types
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import tracing
from mindspeed_fx.errors import nearest


class ShipError(ValueError):
    """The model cannot be brought to the other process; the message says why and what to do."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            _refuse_subclass(value)
            parameter = isinstance(value, torch.nn.Parameter)
            attributes = {k: v for k, v in vars(value).items() if not callable(v)}
            return _rebuild, (
                tuple(value.shape),
                value.stride(),
                value.dtype,
                value.requires_grad,
                parameter,
                attributes,
            )
        if isinstance(value, torch.storage.UntypedStorage):
            raise ShipError("the model holds a raw storage, which has values only")
        return NotImplemented


def _rebuild(
    shape: tuple, stride: tuple, dtype: torch.dtype, requires_grad: bool, parameter: bool, attributes: dict
) -> torch.Tensor:
    value = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    value = torch.nn.Parameter(value, requires_grad) if parameter else value.requires_grad_(requires_grad)
    vars(value).update(attributes)
    return value


def _refuse_subclass(value: torch.Tensor) -> None:
    if tracing.wraps_tensors(value):
        raise ShipError(
            f"the model holds a {type(value).__name__}; only plain tensors and parameters can be cross-compiled"
        )


def pack(model: Any, args: tuple, kwargs: dict) -> bytes:
    """Bytes of (model, args, kwargs) without any tensor's values; a few kilobytes a layer.

    Raises:
        ShipError: something cannot be pickled, such as a class or function defined within a function.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((model, args, kwargs))
    except ShipError:
        raise
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as e:
        raise ShipError(
            f"{type(model).__name__} cannot be sent to the process that has torch_npu: {e}. Define its classes and "
            "functions at the top level of a module; "
            'or give "SCRIPT.py:FUNCTION", whose function returns (model, args) or (model, args, kwargs) and is called '
            "in that process"
        ) from e
    return buffer.getvalue()


def unpack(data: bytes) -> tuple[Any, tuple, dict]:
    """What :func:`pack` packed, every tensor on the meta device."""
    return pickle.loads(data)


def build(script: str, function: str) -> tuple[Any, tuple, dict]:
    """Call ``function`` of ``script`` with the meta device as the default, so that weights take no memory.

    Raises:
        ShipError: no such function, or it returns something else than (model, args[, kwargs]).
    """
    with torch.device("meta"):
        namespace = runpy.run_path(script)
        if not callable(namespace.get(function)):
            defined = [
                n
                for n, v in namespace.items()
                if isinstance(v, types.FunctionType) and v.__module__ == namespace["__name__"]
            ]
            raise ShipError(
                f'{script} has no function "{function}"{nearest(function, defined)}; it has: '
                f"{', '.join(defined) or 'none'}"
            )
        result = namespace[function]()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ShipError(
            f"{function} returned a {type(result).__name__}; it must return (model, args) or (model, args, kwargs)"
        )
    model, args, kwargs = (*result, {})[:3]
    check_inputs(function, model, args, kwargs)
    return model, tuple(args), dict(kwargs)


def check_inputs(where: str, model: Any, args: Any, kwargs: Any) -> None:
    """Refuses what is no model with its inputs, by the name of the function that they come from."""
    if not callable(model):
        raise ShipError(f"{where}: the model is a {type(model).__name__}; a module or function is wanted")
    if not isinstance(args, (tuple, list)):
        raise ShipError(
            f"{where}: args is a {type(args).__name__}; a tuple of the model's inputs is wanted, such as (tensor,)"
        )
    if not isinstance(kwargs, dict):
        raise ShipError(f"{where}: kwargs is a {type(kwargs).__name__}; a dict of the model's inputs by name is wanted")


def split(source: str) -> tuple[str, str]:
    """ "SCRIPT.py:FUNCTION" -> absolute path and function name; ShipError where it is something else."""
    script, _, function = source.rpartition(":")
    if not script.endswith(".py") or not function:
        raise ShipError(f"{source!r} is not SCRIPT.py:FUNCTION, such as model.py:make")
    if not pathlib.Path(script).is_file():
        raise ShipError(f"there is no {script}")
    return str(pathlib.Path(script).absolute()), function


def to_fake(mode: Any, device: str, model: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The model, changed in place, and its inputs with fake tensors on ``device`` for all that they hold.

    Parameters, buffers and tensors among a module's attributes (in lists, tuples and dicts too) are replaced; what is
    shared stays shared. Values are lost: code that reads one (``.item()``) cannot be traced.
    """
    results: dict[int, torch.Tensor] = {}
    keep = []  # an id is unique only while its object lives

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not tracing.is_fake_of(value, mode):
            _refuse_subclass(value)
        elif value.device == torch.device(device):
            return value
        if id(value) not in results:
            keep.append(value)
            new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            new = (
                torch.nn.Parameter(new, value.requires_grad)
                if isinstance(value, torch.nn.Parameter)
                else new.requires_grad_(value.requires_grad)
            )
            vars(new).update(vars(value))
            results[id(value)] = new
        return results[id(value)]

    with mode:
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    held[name] = fake(value)
            for name, value in list(vars(module).items()):
                if name not in ("_parameters", "_buffers", "_modules") and any(
                    isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value)
                ):
                    vars(module)[name] = pytree.tree_map(fake, value)
        return model, pytree.tree_map(fake, args), pytree.tree_map(fake, kwargs)
