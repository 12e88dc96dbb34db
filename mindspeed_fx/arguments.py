"""Checks of the arguments of public functions: one line that names function, argument, value and what is expected; and
sizes in bytes, which options take too.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import re
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from mindspeed_fx.errors import OptionError, nearest


class ArgumentError(OptionError):
    """A bad argument of a function: the message names the function, the argument, the value and what is expected."""


def refuse(function: str, name: str, value: Any, expected: str) -> None:
    """Raises the error for one argument."""
    raise ArgumentError(f"{function}: {name} is {format_value(value)}; {expected}")


def format_value(value: Any) -> str:
    """A value in few words: tensors, modules and functions by what they are."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a module ({type(value).__name__})"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_module(function: str, value: Any) -> None:
    if not isinstance(value, nn.Module):
        refuse(
            function,
            "model",
            value,
            "a torch.nn.Module is expected, whose parameters have names; put a function into a module's forward",
        )


def check_callable(function: str, name: str, value: Any, optional: bool = False) -> None:
    if not (optional and value is None) and (not callable(value) or isinstance(value, type)):
        refuse(function, name, value, f"a module or function is expected{', or None' * optional}")


def check_call(function: str, args: Any, kwargs: Any, model: Any = None) -> None:
    """``args`` is a sequence, ``kwargs`` a mapping from names, and ``model`` takes them."""
    if isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Sequence):
        refuse(function, "args", args, "a tuple or list of the model's arguments is expected, as in (ids, labels)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        refuse(
            function,
            "kwargs",
            kwargs,
            'a mapping from names of the model\'s arguments is expected, as in {"labels": labels}',
        )
    if model is not None and not getattr(model, "_forward_pre_hooks", None):  # which may change what forward gets
        taken = model.forward if isinstance(model, nn.Module) else model
        try:
            signature = inspect.signature(taken)
        except (TypeError, ValueError):  # written in C
            return
        try:
            signature.bind(*args, **(kwargs or {}))
        except TypeError as e:
            raise ArgumentError(
                f"{function}: the model does not take these args and kwargs ({e}); it is called with {signature}"
            ) from None


def check_whole(function: str, name: str, value: Any, least: int = 1, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        refuse(function, name, value, f"a whole number from {least} on is expected{', or None' * optional}")


def check_wholes(function: str, name: str, value: Any) -> None:
    """A sequence of whole numbers from 1 on, or None."""
    if value is None:
        return
    numbers = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [None]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        refuse(function, name, value, "a list of whole numbers from 1 on is expected, or None")


def check_seconds(function: str, name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        refuse(function, name, value, "seconds above 0 are expected, or None")


def check_bool(function: str, name: str, value: Any, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        refuse(function, name, value, f"True{', False or None' if optional else ' or False'} is expected")


def check_text(function: str, name: str, value: Any, expected: str) -> None:
    if not isinstance(value, str):
        refuse(function, name, value, expected)


def check_folder(function: str, name: str, value: Any) -> None:
    """A directory that is there, or can be made."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        refuse(function, name, value, "a directory is expected")
    if os.path.exists(value) and not os.path.isdir(value):
        refuse(function, name, os.fspath(value), "a directory is expected, and this is a file")


def check_file(name: str, path: str) -> None:
    """A file that the user named is there; ``name`` is the flag or the argument.

    Raises:
        FileNotFoundError, IsADirectoryError: it is not, or is a directory.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{name} {path} is a directory; a file is expected")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{name} {path}: there is no such file in {os.getcwd()}")


def check_output(name: str, path: Any) -> None:
    """A file can be written at ``path``, before minutes of work; None is none.

    Raises:
        ArgumentError: a directory, or a directory that is not there.
    """
    if path is None:
        return
    parent = os.path.dirname(path) or "."
    if os.path.isdir(path) or not str(path):
        raise ArgumentError(f"{name} {path}: the name of a file is expected, and this is a directory")
    if not os.path.isdir(parent):
        raise ArgumentError(f"{name} {path}: there is no directory {parent}")


def check_new_file(name: str, path: Any) -> None:
    """As :func:`check_output`, where directories above are made."""
    if os.path.isdir(path):
        raise ArgumentError(f"{name} {path}: the name of a file is expected, and this is a directory")
    above = os.path.abspath(path)
    while not os.path.exists(above := os.path.dirname(above)):
        pass
    if not os.path.isdir(above):
        raise ArgumentError(f"{name} {path}: {above} is a file, and no directory can be made below it")


def check_instance(function: str, name: str, value: Any, kinds: Any, expected: str) -> None:
    if not isinstance(value, kinds):
        refuse(function, name, value, expected)


def check_fields(what: str, value: Any, least: Mapping[str, int], choices: Mapping[str, Sequence[Any]]) -> None:
    """The numbers, switches and words of a dataclass.

    Args:
        least: smallest number of a field, 0 where it is not named.
        choices: values of a field that has a few.
    """
    for field in dataclasses.fields(value):
        name, own = field.name, getattr(value, field.name)
        if valid := choices.get(name):
            if isinstance(own, bool) or own not in valid:
                close = nearest(own, valid) if isinstance(own, str) and isinstance(valid[0], str) else ""
                refuse(what, name, own, f"valid: {', '.join(map(str, valid))}{close}")
        elif field.type == "int":
            check_whole(what, name, own, least=least.get(name, 0))
        elif field.type == "bool":
            check_bool(what, name, own)
        elif field.type == "float" and not (type(own) in (int, float) and 0 <= own <= 1):
            refuse(what, name, own, "a share from 0 to 1 is expected")


def check_names(what: str, values: Any, kind: type) -> None:
    """``values`` is a mapping from fields of a dataclass, and has those without a default."""
    fields = dataclasses.fields(kind)
    known = [f.name for f in fields]
    if not isinstance(values, Mapping):
        raise ArgumentError(f"{what} is {format_value(values)}; a mapping is expected, with some of {', '.join(known)}")
    for name in (n for n in values if n not in known):
        raise ArgumentError(f"{what} has no {name!r}{nearest(str(name), known)}; valid: {', '.join(known)}")
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
    if needed:
        raise ArgumentError(f"{what} lacks {', '.join(needed)}; it has {', '.join(map(str, values)) or 'nothing'}")


def check_word(function: str, name: str, value: Any, valid: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in valid:
        refuse(
            function, name, value, f"valid: {', '.join(valid)}{nearest(value, valid) if isinstance(value, str) else ''}"
        )


def check_path(function: str, name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, (str, os.PathLike)) and str(value)):
        refuse(function, name, value, "a directory is expected, or None")


def check_options(function: str, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        refuse(function, "options", value, 'a mapping from names of options is expected, as in {"level": 1}, or None')


def check_sizes(function: str, value: Any) -> dict[str, int]:
    """The sizes of a mesh that is a mapping."""
    if not isinstance(value, Mapping) or not value:
        refuse(function, "mesh", value, 'a mapping from mesh dimensions to ranks is expected, as in {"dp": 2, "tp": 4}')
    for name, n in value.items():
        if not isinstance(name, str) or not name:
            refuse(function, "mesh", value, f'names of dimensions are expected, as in {{"dp": 2}}, not {name!r}')
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            refuse(function, f'mesh["{name}"]', n, "a whole number of ranks from 1 on is expected")
    return dict(value)


def check_device_mesh(function: str, value: Any) -> None:
    if not hasattr(value, "mesh_dim_names"):
        refuse(
            function,
            "mesh",
            value,
            "a DeviceMesh with named dimensions is expected: init_device_mesh(device, sizes, mesh_dim_names=names)",
        )


def json_object(name: str, text: str, example: str = '{"level": 1}') -> dict[str, Any]:
    """The JSON object that ``text`` is.

    Raises:
        OptionError: it is none, or has a name twice; the message begins with ``name``.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for key, value in pairs:
            if key in results:
                raise OptionError(f'{name} has "{key}" twice, as {results[key]!r} and {value!r}; once is expected')
            results[key] = value
        return results

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as e:
        raise OptionError(f"{name} is not JSON ({e}): {format_value(text)}") from None
    if not isinstance(values, dict):
        raise OptionError(f"{name} must be a JSON object, as in '{example}', not {format_value(text)}")
    return values


VARIABLES = tuple(
    f"MINDSPEED_FX_{name}"
    for name in (
        "OPTIONS DUMP COMPILE RESTORE_COMPILE SKIP_FLAGS DUMP_TENSORS DUMP_MODULES HARDWARE TOOLCHAIN TRITON STUB"
    ).split()
)
"""Every variable of the environment that the package, its workers or its tests read."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuses a variable that is nearly one of ours; another may be another program's.

    Raises:
        OptionError: with the nearest name.
    """
    start = "MINDSPEED_FX_"
    for name in (n for n in environ if n.startswith(start) and n not in VARIABLES):
        short = [v.removeprefix(start) for v in VARIABLES]
        if close := difflib.get_close_matches(name.removeprefix(start), short, n=1, cutoff=0.7):
            raise OptionError(
                f"the environment has {name} = {environ[name]!r}, which nothing reads (did you mean "
                f'"{start}{close[0]}"?); valid: {", ".join(VARIABLES)}'
            )


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


LEAST_SIZE = 2**10
"""Bytes under which a size is taken for a slip: 60 for "60GiB"."""


def parse_bytes(name: str, value: Any, least: int = LEAST_SIZE) -> int:
    """A number of bytes from 2**20 or "1MiB".

    Raises:
        OptionError: no size, or one between 0 and ``least``, for which nobody asks.
    """
    size = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == value // 1:
        size = int(value)
    if size is None:
        units = ", ".join(("B", "KiB", "MiB", "GiB", "KB", "MB", "GB"))
        raise OptionError(
            f'option "{name}" is {value!r}; valid: bytes as a number from 0, or with a unit as in "512MiB" ({units})'
        )
    if 0 < size < least:
        number = re.sub(r"[^\d.]", "", str(value))
        raise OptionError(
            f'option "{name}" is {value!r}, which is {size} bytes and too few to be meant; valid: a size with a unit, '
            f'as in "{number}GiB"'
        )
    return size
