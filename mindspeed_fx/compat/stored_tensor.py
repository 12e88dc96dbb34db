"""Tensors that hold their numbers in another form than the one that they are read and written in."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class StoredTensor(Tensor):
    """A tensor without memory of its own: operators read :meth:`whole` of it, and what they write goes to :meth:`keep`.

    A view of one is a copy. It is saved, and copied to another device, whole; it has no gradient.
    """

    @staticmethod
    def __new__(cls, like: Tensor, *parts: Any) -> StoredTensor:
        """
        Args:
            like: a tensor of the shape, type and device that others see.
            parts: what it is held as, for ``__init__``.
        """
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @abstractmethod
    def whole(self) -> Tensor:
        """A new tensor of its numbers."""

    @abstractmethod
    def keep(self, values: Tensor) -> None:
        """Hold ``values``, of its shape, from now on."""

    @abstractmethod
    def same(self, is_copy: bool) -> StoredTensor:
        """Another that shares what this one holds, or has a copy of it."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return memo.setdefault(id(self), self.same(True))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return args[0].same(func is aten.clone.default)
        kwargs = kwargs or {}
        parameters = func._schema.arguments
        written = {a.name for a in parameters if a.is_write}
        named = {**dict(zip((a.name for a in parameters), args)), **kwargs}
        held = (t for t in pytree.tree_leaves(list(named.values())) if isinstance(t, StoredTensor))
        stored = {id(t): (t, t.whole()) for t in held}

        def read(value: Any) -> Any:
            return stored[id(value)][1] if isinstance(value, StoredTensor) else value

        result = func(*pytree.tree_map(read, args), **pytree.tree_map(read, kwargs))
        for name, value in named.items():
            for tensor in pytree.tree_leaves(value) if name in written else ():
                if isinstance(tensor, StoredTensor):
                    tensor.keep(stored[id(tensor)][1])
        back = {id(values): tensor for tensor, values in stored.values()}
        return pytree.tree_map(lambda value: back.get(id(value), value), result)
