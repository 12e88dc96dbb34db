"""Named axes: which dimensions of which tensors are the same thing.

Every dimension of every tensor is an ordered product of atoms. Operators tie atoms together (a linear layer keeps those
of the rows, an addition those of both sides), reshapes split and merge them. So "heads", "sequence" or "hidden" is one
number throughout a model, a view costs nothing and needs no choice, and a placement is the atom that is divided.

Source of the idea: named-dimension analysis, TOAST (arXiv 2508.15010).
"""

from __future__ import annotations

import math
from typing import Sequence

Dim = tuple[int, ...]
"""Atoms of one dimension, outermost first; () for a dimension of size 1."""


class Axes:
    """The atoms of one graph: union-find, with atoms that were split into an outer and an inner one."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, Dim] = {}

    def new(self, size: int) -> Dim:
        """A dimension that is tied to nothing yet."""
        if size == 1:
            return ()
        self.size.append(size)
        self._parent.append(len(self._parent))
        return (len(self._parent) - 1,)

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = atom = self._parent[self._parent[atom]]
        return atom

    def atoms(self, dim: Dim) -> Dim:
        """``dim`` in the atoms of now."""
        results: list[int] = []
        for a in dim:
            a = self._root(a)
            results += self.atoms(self._parts[a]) if a in self._parts else (a,)
        return tuple(results)

    def extent(self, dim: Dim) -> int:
        return math.prod(self.size[a] for a in self.atoms(dim))

    def _split(self, atom: int, outer: int) -> Dim:
        self._parts[atom] = self.new(outer) + self.new(self.size[atom] // outer)
        return self._parts[atom]

    def unify(self, a: Dim, b: Dim) -> bool:
        """Say that two dimensions are the same; False, and nothing more is tied, where their factors do not fit."""
        left, right = list(self.atoms(a)), list(self.atoms(b))
        if (self.extent(a) == 0) != (self.extent(b) == 0):
            return False
        while left and right:
            x, y = left[0], right[0]
            if x == y:
                left.pop(0), right.pop(0)
            elif self.size[x] == self.size[y]:
                self._parent[self._root(y)] = self._root(x)
                left.pop(0), right.pop(0)
                left, right = list(self.atoms(tuple(left))), list(self.atoms(tuple(right)))
            elif self.size[x] % self.size[y] == 0:
                self._split(x, self.size[y])
                left, right = list(self.atoms(tuple(left))), list(self.atoms(tuple(right)))
            elif self.size[y] % self.size[x] == 0:
                self._split(y, self.size[x])
                left, right = list(self.atoms(tuple(left))), list(self.atoms(tuple(right)))
            else:
                return False
        return not left and not right

    def reshape(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
        """The dimensions of a view of ``shape``; those whose factors do not fit are new."""
        remaining = [a for d in dims for a in self.atoms(d)]
        if 0 in shape:
            return [self.new(int(n)) for n in shape]
        results: list[Dim] = []
        for size in shape:
            taken, need = [], int(size)
            while need > 1 and remaining:
                a = remaining[0]
                if need % self.size[a] == 0:
                    need //= self.size[a]
                    taken.append(remaining.pop(0))
                elif self.size[a] % need == 0:
                    self._split(a, need)
                    remaining = list(self.atoms(tuple(remaining)))
                else:
                    return [self.new(int(n)) for n in shape]
            results.append(tuple(taken) if need == 1 else self.new(int(size)))
        return results
