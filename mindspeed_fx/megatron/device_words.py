"""Megatron's code says ``"cuda"`` where it means the accelerator of this process; where that is not CUDA, the word is
exchanged in the constants of Megatron's own functions.

``torch.empty(..., device="cuda")`` becomes ``device="cpu"`` (or ``"npu"``), and the names of tensor types by which its
optimizers tell half from full precision (``"torch.cuda.HalfTensor"``) become those of the device. Nothing of torch is
changed by it, and a constant in a function is what Dynamo sees. Modules that are imported later are read through an
import hook, which also tells (:func:`when_imported`) that a module of Megatron is there.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any, Callable

PACKAGE = "megatron"
NVIDIA_TYPES = "torch.cuda."


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of Megatron with ``words`` exchanged, and calls what waits for it."""

    words: Words

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.words.exchange_in_module(module)
        for action in self.words.waiting.pop(module.__name__, []):
            action()


class Words(importlib.abc.MetaPathFinder):
    """The exchange of words in Megatron's functions, for as long as it is on ``sys.meta_path``.

    Args:
        device: what stands for ``"cuda"``; None leaves it.
        types: what stands for ``"torch.cuda."`` in a tensor type, "torch." on a CPU; None leaves it.
        package: whose functions they are.
    """

    def __init__(self, device: str | None, types: str | None, package: str = PACKAGE) -> None:
        self.device, self.types, self.package = device, types, package
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self._restore: list[Callable[[], None]] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of a source file of Megatron, with this loader; None for everything else."""
        if fullname.partition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        loader = _Loader(spec.loader.name, spec.loader.path)
        loader.words = self
        spec.loader = loader
        return spec

    def install(self) -> None:
        """Exchange the words in every module that is loaded, and in those that come."""
        sys.meta_path.insert(0, self)
        for name, module in list(sys.modules.items()):
            if module is not None and name.partition(".")[0] == self.package:
                self.exchange_in_module(module)

    def remove(self) -> None:
        """Restore the functions of :meth:`install`, and of modules that were imported since."""
        sys.meta_path.remove(self)
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()
        self.waiting.clear()

    def when_imported(self, module: str, action: Callable[[], None]) -> None:
        """Run ``action`` once ``module`` of Megatron has been imported: now, if it is there."""
        if module in sys.modules:
            action()
        else:
            self.waiting.setdefault(module, []).append(action)

    def _exchange_in_code(self, code: CodeType) -> CodeType:
        constants = tuple(self._exchange(c) for c in code.co_consts)
        unchanged = all(new is old for new, old in zip(constants, code.co_consts))
        return code if unchanged else code.replace(co_consts=constants)

    def _exchange(self, constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return self._exchange_in_code(constant)
        if isinstance(constant, (tuple, frozenset)):
            new = [self._exchange(c) for c in constant]
            return constant if all(a is b for a, b in zip(new, constant)) else type(constant)(new)
        return self._exchange_word(constant) if isinstance(constant, str) else constant

    def _exchange_word(self, word: str) -> str:
        if self.device is not None and word in ("cuda", "cuda:"):
            return word.replace("cuda", self.device)
        if self.types is not None and word.startswith(NVIDIA_TYPES) and word.endswith("Tensor"):
            return self.types + word[len(NVIDIA_TYPES) :]
        return word

    def exchange_in_module(self, module: ModuleType) -> None:
        """Exchange the words in the functions of ``module`` and in the methods of its classes."""
        if self.device is None and self.types is None:
            return
        holders = [module, *(c for c in vars(module).values() if _is_class_of(c, module))]
        for holder in holders:
            for value in list(vars(holder).values()):
                function = _plain_function(value)
                if function is not None and function.__module__ == module.__name__:
                    self._exchange_in_function(function)

    def _exchange_in_function(self, function: FunctionType) -> None:
        before = function.__code__, function.__defaults__, function.__kwdefaults__
        function.__code__ = self._exchange_in_code(function.__code__)
        function.__defaults__ = self._exchange(function.__defaults__)
        if function.__kwdefaults__:
            function.__kwdefaults__ = {k: self._exchange(v) for k, v in function.__kwdefaults__.items()}

        def restore() -> None:
            function.__code__, function.__defaults__, function.__kwdefaults__ = before

        if before != (function.__code__, function.__defaults__, function.__kwdefaults__):
            self._restore.append(restore)


def _is_class_of(value: Any, module: ModuleType) -> bool:
    # isinstance asks for __class__, which Megatron's guards of experimental classes refuse
    return issubclass(type(value), type) and value.__module__ == module.__name__


def _plain_function(value: Any) -> FunctionType | None:
    """The function behind a method, a property or a decorator that keeps what it wraps."""
    if issubclass(type(value), (classmethod, staticmethod)):
        value = value.__func__
    elif issubclass(type(value), property):
        value = value.fget
    elif issubclass(type(value), functools.cached_property):
        value = value.func
    while (wrapped := inspect.getattr_static(value, "__wrapped__", None)) is not None:
        value = wrapped
    return value if issubclass(type(value), FunctionType) else None
