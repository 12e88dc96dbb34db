"""What Inductor calls before AOTAutograd, and what compile caches know the backend by."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Callable

import torch.fx as fx

from mindspeed_fx.compat import inductor
from mindspeed_fx.modules import package_hash
from mindspeed_fx.options import Options
from mindspeed_fx.passes import registered


class CapturedPasses(inductor.CustomPass):
    """Inductor's pre-grad hook: capture and the captured passes. Called for nested graphs too, which capture reaches by
    itself, so only the graph it was made for counts."""

    def __init__(self, capture: Callable[[fx.GraphModule], Any], gm: fx.GraphModule, name: str):
        self.capture, self.name = capture, name
        gm.meta["mindspeed_fx"] = name

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if gm.meta.pop("mindspeed_fx", None) == self.name:
            self.capture(gm)

    def uuid(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return (str, (self.name,))


def identity(options: Options) -> str:
    """What compile caches know this backend by: package sources, options, and the sources of every pass."""
    parts = [
        package_hash(),
        json.dumps(options.as_dict(), sort_keys=True, default=str),
        *(p.name + p.source_hash() for p in registered()),
    ]
    return "mindspeed_fx-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()
