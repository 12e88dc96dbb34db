"""Which module of the model a node comes from."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch.fx as fx


def module_path(node: fx.Node) -> str:
    """Path of the module whose forward made ``node``, as ``named_modules`` spells it."""
    return _path(node.meta.get("nn_module_stack"))


def origin_path(node: fx.Node) -> str:
    """Path of the module that ``node`` belongs to, also where it is part of that module's gradient."""
    return module_path(node) or _path(node.meta.get("fwd_nn_module_stack"))


def _path(stack: Any) -> str:
    return spelled(list(stack.values())[-1][0]) if stack else ""


@functools.lru_cache(maxsize=2**16)
def spelled(path: str) -> str:
    """Dynamo's name of a module as ``named_modules`` has it."""
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]", lambda m: "." + (m.group(1) or m.group(2)), path)
    return re.sub(r"^(self\.)?_modules\.|\.?_modules\.", ".", path).strip(".")
