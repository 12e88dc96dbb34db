"""Where in the user's code a node comes from."""

from __future__ import annotations

import functools
import re

import torch.fx as fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def source_line(node: fx.Node) -> str:
    """``file:line: code`` of the innermost line outside torch itself; "" when unknown. Paths keep their last three
    parts.
    """
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=2**16)
def _innermost(trace: str) -> str:
    """Many nodes come from one line, and a graph is written again and again."""
    frames = _FRAME.findall(trace)
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    if not own:
        return ""
    file, line, code = own[-1]
    return f"{'/'.join(file.split('/')[-3:])}:{line}: {code.strip()}"
