"""Outputs of modules and their gradients in files, and two such folders compared.

    with mindspeed_fx.dump_tensors(model, "a", modules="layers.*"):
        model(batch).backward()

    mindspeed-fx compare-dumps a b

Hooks on modules inside a compiled one would break its graph, so that compiled models run eager meanwhile, and a
warning says so; with ``compiled=True`` they run compiled, and of each compiled module the boundary alone is seen: its
outputs and their gradients, which an eager run's dump of the same modules can be compared with.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mindspeed_fx import arguments
from mindspeed_fx.errors import nearest
from mindspeed_fx.training.profile import find_rank

INDEX = "index.jsonl"
WRAPPER = "_orig_mod."
KEYS = ("module", "kind", "call", "output", "file")
"""Of a row of the index."""


@contextlib.contextmanager
def dump_tensors(
    model: nn.Module, folder: str | Path, modules: str = "*", *, compiled: bool = False, prefix: str = ""
) -> Iterator[None]:
    """Writes outputs of modules, and the gradients of those outputs, to ``folder/rankN``.

    Args:
        model: whose modules are seen; torch.compile's wrapper leaves no trace in their names.
        folder: made where it is not there; files of an earlier dump in it are an error.
        modules: names or globs, joined by commas; "" is the model itself.
        compiled: compiled modules stay compiled, and their boundaries alone are seen.
        prefix: before every name.

    Raises:
        ValueError: no module has such a name; with ``compiled``, none that matches is a compiled one.
        FileExistsError: the folder has a dump of the same names.
    """
    arguments.check_module("dump_tensors", model)
    arguments.check_folder("dump_tensors", "folder", folder)
    arguments.check_text("dump_tensors", "modules", modules, "names or globs, joined by commas, are expected")
    arguments.check_bool("dump_tensors", "compiled", compiled)
    arguments.check_text("dump_tensors", "prefix", prefix, "a text is expected")
    globs = [glob.strip() for glob in modules.split(",")]
    named = {(prefix + name.replace(WRAPPER, "")).removesuffix("._orig_mod"): m for name, m in model.named_modules()}
    named.pop("_orig_mod", None)
    chosen = {n: m for n, m in named.items() if any(fnmatch.fnmatchcase(n.removeprefix(prefix), g) for g in globs)}
    in_graphs = [m for m in model.modules() if _is_compiled(m)]
    if compiled:
        chosen = {n: m for n, m in chosen.items() if _is_compiled(m)}
    if not chosen:
        kind = "compiled " * compiled
        close = nearest(modules, [n.removeprefix(prefix) for n in named])
        raise ValueError(f"dump_tensors: modules is {modules!r}: no {kind}module has such a name{close}")
    writer = _Writer(Path(folder) / f"rank{find_rank()}")
    with contextlib.ExitStack() as stack:
        if in_graphs and not compiled:
            warnings.warn(
                "tensors are dumped: what is compiled runs eager meanwhile, since hooks on its modules would break the "
                "graph; compiled=True sees the boundaries of compiled modules",
                stacklevel=3,
            )
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in chosen.items():
            stack.callback(_watch(module, functools.partial(writer.keep, name)))
        yield


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _watch(module: nn.Module, keep: Callable[[Any], None]) -> Callable[[], None]:
    """Has ``keep`` called with every result of the module, outside its graph; returns what ends that."""
    call = getattr(module, "_compiled_call_impl", None)
    if call is None or hasattr(module, "_orig_mod"):
        return module.register_forward_hook(lambda module, args, out: keep(out)).remove

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        keep(out)
        return out

    module._compiled_call_impl = watched
    return functools.partial(setattr, module, "_compiled_call_impl", call)


class _Writer:
    """Files and their index, in the order in which tensors came to be."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.calls, self.count = folder, Counter[str](), len(list(folder.glob("*.pt")))
        self.names = {row["module"] for row in _rows(folder)}

    def keep(self, module: str, out: Any) -> None:
        if module in self.names:
            raise FileExistsError(f"{self.folder} has a dump of {module!r}; give another folder, or remove it")
        call = self.calls[module]
        self.calls[module] += 1
        for k, tensor in enumerate(t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)):
            row = {"module": module, "call": call, "output": k}
            self.write(tensor, {**row, "kind": "forward"})
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self.write, row={**row, "kind": "gradient"}))

    def write(self, tensor: Tensor, row: dict[str, Any]) -> None:
        """Must return None: the result of a hook of autograd's is a gradient."""
        file = f"{self.count:06d}.pt"
        self.count += 1
        torch.save(tensor.detach().cpu().clone(), self.folder / file)
        with open(self.folder / INDEX, "a") as index:
            index.write(json.dumps({**row, "file": file}) + "\n")


def _rows(folder: Path) -> list[dict[str, Any]]:
    index = folder / INDEX
    try:
        rows = [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []
        if all(set(KEYS) <= set(row) for row in rows):
            return rows
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{index} is no index of a dump (it is torn, or of another version); dump again")


@dataclass(frozen=True)
class Difference:
    """One tensor of two dumps.

    Args:
        name: rank, module, kind, call and output.
        absolute, relative: the largest of any element; of nan where one side alone has it, infinite.
        is_beyond: of the tolerance.
        note: why the two cannot be compared; "".
    """

    name: str
    absolute: float
    relative: float
    is_beyond: bool
    note: str = ""

    def __str__(self) -> str:
        mark = "DIFFERS" if self.is_beyond else "equal" if self.absolute == 0 else "close"
        return f"{mark:<8} {self.name}: " + (self.note or f"absolute {self.absolute:.3g}, relative {self.relative:.3g}")


def compare_dumps(a: str | Path, b: str | Path, rtol: float = 1e-5, atol: float = 1e-8) -> list[Difference]:
    """A :class:`Difference` for each tensor of either dump, in the order of ``a``; beyond where
    ``|a - b| > atol + rtol |a|`` for an element.

    Raises:
        ArgumentError: a tolerance that is no number from 0 on, or one folder twice.
        FileNotFoundError: a folder holds no dump, or lacks a file of one.
        ValueError: a file is torn, or another's.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            arguments.refuse("compare_dumps", name, value, "a number from 0 on is expected")
    if Path(a).resolve() == Path(b).resolve():
        raise arguments.ArgumentError(f"compare_dumps: {a} is compared with itself; two folders are expected")
    sides = [_read(Path(folder)) for folder in (a, b)]
    results = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        name = "{} {} {}, call {}, output {}".format(*key)
        missing = [str(folder) for folder, side in zip((a, b), sides) if key not in side]
        if missing:
            results.append(Difference(name, float("inf"), float("inf"), True, f"not in {missing[0]}"))
        else:
            x, y = (_load(side[key]) for side in sides)
            results.append(compare_tensors(name, x, y, rtol, atol))
    return results


def _load(path: Path) -> Tensor:
    try:
        value = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there, and {INDEX} beside it names it; dump again") from None
    except Exception as e:
        raise ValueError(f"{path} holds no tensor ({type(e).__name__}: it is torn, or another's); dump again") from e
    if not isinstance(value, Tensor):
        raise ValueError(f"{path} holds {arguments.format_value(value)}; a tensor is expected: dump again")
    return value


def _read(folder: Path) -> dict[tuple, Path]:
    """(rank, module, kind, call, output) -> file."""
    if not any(folder.glob(f"rank*/{INDEX}")):
        raise FileNotFoundError(f"{folder} holds no dump of tensors (rank*/{INDEX})")
    return {
        (rank.name, row["module"], row["kind"], row["call"], row["output"]): rank / _plain_name(row["file"], rank)
        for rank in sorted(folder.glob("rank*"))
        for row in _rows(rank)
    }


def _plain_name(file: str, folder: Path) -> str:
    """A file's name that an index has: of a file of that folder."""
    if not re.fullmatch(r"\d+\.pt", file):
        raise ValueError(f"{folder / INDEX} names {file!r}; valid: names of files that dump_tensors writes, NUMBER.pt")
    return file


def compare_tensors(name: str, x: Tensor, y: Tensor, rtol: float, atol: float) -> Difference:
    """The :class:`Difference` of two tensors; nan and nan are equal, as are infinities of one sign."""
    if x.shape != y.shape:
        return Difference(name, float("inf"), float("inf"), True, f"shapes {list(x.shape)} and {list(y.shape)}")
    if x.numel() == 0:
        return Difference(name, 0.0, 0.0, False)
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
    same = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    relative = torch.where(same, 0.0, gap / x.abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    is_beyond = bool((~same & ~(gap <= atol + rtol * x.abs().nan_to_num(posinf=0.0))).any())
    return Difference(name, gap.max().item(), relative.max().item(), is_beyond)


def describe(differences: list[Difference]) -> str:
    """A line for each tensor, and the first that differs."""
    first = next((d for d in differences if d.is_beyond), None)
    last = f"first difference: {first.name}" if first else f"{len(differences)} tensors, none beyond the tolerance"
    return "\n".join([*map(str, differences), last])
