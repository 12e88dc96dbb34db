"""A model whose modules and parameters have names that say nothing: the source of a module of tests, other words."""

from __future__ import annotations

import inspect
import re
import sys
import types

WORDS = {
    "q_proj": "xa", "k_proj": "xb", "v_proj": "xc", "o_proj": "xd", "gate_proj": "ya", "up_proj": "yb",
    "down_proj": "yc", "embed": "t", "head": "z", "experts": "pool", "router": "chooser", "gate": "e1", "up": "e2",
    "down": "e3", "attention": "a", "mlp": "m", "shared": "other", "Llama": "Llama", "Experts": "Pool",
}  # fmt: skip
SIZES = ("experts", "shared", "heads")
"""Arguments of constructors, which keep their names."""


def renamed(module: types.ModuleType, words: dict[str, str] = WORDS) -> types.ModuleType:
    """``module`` anew, in which attributes of these names have others."""
    text = inspect.getsource(module)
    for old, new in words.items():
        text = re.sub(rf"(?<=\.){old}\b", new, text)
    for base in ("llama", "mixtral"):
        text = text.replace(f"from tests.sharding.{base} import", f"from tests.sharding.renamed_{base} import")
    result = types.ModuleType(f"tests.sharding.renamed_{module.__name__.rpartition('.')[2]}")
    sys.modules[result.__name__] = result
    exec(compile(text, f"<{result.__name__}>", "exec"), result.__dict__)
    return result


def new_names(names: list[str], words: dict[str, str] = WORDS) -> dict[str, str]:
    """Parameter -> its name there."""
    return {n: ".".join(words.get(word, word) for word in n.split(".")) for n in names}
