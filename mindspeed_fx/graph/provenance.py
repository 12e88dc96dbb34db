"""Which module of the model a node comes from."""

from __future__ import annotations

import re

import torch.fx as fx


def module_path(node: fx.Node) -> str:
    """Path of the module whose forward made ``node``, as ``named_modules`` spells it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]", lambda m: "." + (m.group(1) or m.group(2)), path)
    return re.sub(r"^(self\.)?_modules\.|\.?_modules\.", ".", path).strip(".")
