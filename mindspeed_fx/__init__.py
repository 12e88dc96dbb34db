"""mindspeed_fx: MindSpeed as a ``torch.compile`` backend.

    step = torch.compile(model, backend="mindspeed")

Importing this package is optional (the backend is found by its entry point) and cheap; it gives :func:`accumulate`,
:class:`FlopCount`, :func:`compile`, :func:`dump_tensors`, :func:`explain`, :func:`generate`, :func:`in_parts`,
:func:`load_compiled`, :func:`parallelize` with its :class:`Plan`, :func:`pipeline_stage`, :func:`plan`,
:func:`predict`, :class:`Profile`, :func:`register_with_accelerate`, :func:`save_compiled`, :func:`simulate`,
:func:`split_backward`, :func:`step_in_backward`, :mod:`mindspeed_fx.ops`, :mod:`mindspeed_fx.passes` and the version.
"""

from __future__ import annotations

import importlib
from typing import Any

from mindspeed_fx._version import __version__
from mindspeed_fx.torch_compile import compile, restore_torch_compile

__all__ = [
    "FlopCount",
    "Plan",
    "Profile",
    "__version__",
    "accumulate",
    "compile",
    "cross_compile",
    "dump_tensors",
    "explain",
    "follow_shapes",
    "generate",
    "in_parts",
    "load_compiled",
    "ops",
    "parallelize",
    "passes",
    "pipeline_stage",
    "pipeline_stages",
    "plan",
    "predict",
    "register_with_accelerate",
    "restore_torch_compile",
    "save_compiled",
    "simulate",
    "split_backward",
    "step_in_backward",
]


_HOMES = {
    "FlopCount": "training.flop_count",
    "Plan": "sharding.plan",
    "Profile": "training.profile",
    "accumulate": "training.accumulation",
    "cross_compile": "ascend.compile",
    "dump_tensors": "training.tensor_dump",
    "explain": "planning.explain",
    "follow_shapes": "planning.pipeline_stage",
    "generate": "planning.generation",
    "in_parts": "training.in_parts",
    "load_compiled": "planning.saved_step",
    "parallelize": "sharding.parallelize",
    "pipeline_stage": "planning.pipeline_stage",
    "pipeline_stages": "planning.pipeline_stage",
    "plan": "planning.search",
    "predict": "planning.predict",
    "register_with_accelerate": "integrations",
    "save_compiled": "planning.saved_step",
    "simulate": "planning.simulate",
    "split_backward": "planning.split_backward",
    "step_in_backward": "training.optimizer_in_backward",
}
"""Where each name is; imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in ("ops", "passes"):
        return importlib.import_module(f"{__name__}.{name}")
    from mindspeed_fx.errors import nearest

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}")
