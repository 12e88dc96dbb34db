"""``--use-multiparameter-pipeline-model-parallel``: stages of a pipeline send several tensors.

Megatron's schedule without virtual stages already receives and sends a list of shapes; what it lacks is where the
shapes come from, a stage's list of outputs, and a backward from several of them. Shapes are those of
``args.pipeline_tensor_shapes``, which the model's provider sets: a list of {"shape": ..., "dtype": ...}; without it
there is one, the hidden states.
Semantics: MindSpeed's multi_parameter pipeline.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mindspeed_fx.arguments import refuse
from mindspeed_fx.megatron import patches, tp_2d
from mindspeed_fx.megatron.run_arguments import training_arguments

FLAG = "--use-multiparameter-pipeline-model-parallel"
SHAPES = "pipeline_parallel.schedules:get_tensor_shapes"
FORWARD_STEP = "pipeline_parallel.schedules:forward_step"


def is_asked() -> bool:
    """Whether the run has the flag."""
    return bool(getattr(training_arguments(), "use_multiparameter_pipeline_model_parallel", False))


def get_tensor_shapes(*, config: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """``schedules.get_tensor_shapes``: those that the provider has set, if the flag is given; with ``--tp-2d`` those of
    a part.

    Raises:
        OptionError: they are no list of shapes, or of another type than Megatron's messages have.
    """
    shapes = getattr(training_arguments(), "pipeline_tensor_shapes", None) if is_asked() else None
    if shapes is None:
        shapes = patches.original(SHAPES)(config=config, **kwargs)
        return [(tp_2d.message_length(tokens), *rest) for tokens, *rest in shapes]
    return read_shapes(shapes, config.pipeline_dtype)


def read_shapes(shapes: Any, dtype: torch.dtype) -> list[tuple[int, ...]]:
    """The shapes of a list of {"shape": ..., "dtype": ...}, all of one type."""
    if not isinstance(shapes, list) or not shapes or not all(isinstance(s, dict) and "shape" in s for s in shapes):
        refuse(FLAG, "args.pipeline_tensor_shapes", shapes, 'a list of {"shape": ..., "dtype": ...} is expected')
    for shape in shapes:
        if shape.get("dtype", dtype) != dtype:
            refuse(FLAG, "args.pipeline_tensor_shapes", shape, f"{dtype} is expected, the type of Megatron's messages")
    return [tuple(s["shape"]) for s in shapes]


def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """``schedules.forward_step``, where a stage may return a list of tensors."""
    output, tokens = patches.original(FORWARD_STEP)(*args, **kwargs)
    is_nested = isinstance(output, list) and len(output) == 1 and isinstance(output[0], (list, tuple))
    return list(output[0]) if is_nested and is_asked() else output, tokens


def has_several(output: Any, grads: Any) -> bool:
    """Whether a backward begins at several tensors of a stage."""
    return isinstance(output, list) and len(output) > 1 and isinstance(grads, list) and len(grads) == len(output)


def backward_step(
    inputs: Any, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], config: Any
) -> list[Tensor | None]:
    """Gradients of what a stage received, from those of all that it sent, in one backward.

    A tensor of which the next stage reads nothing has no gradient. The first output's memory was freed when it was
    sent (``deallocate_pipeline_outputs``): the backward begins at its edge, which knows its shape.
    """
    if config.timers is not None:
        config.timers("backward-compute", log_level=2).start()
    received = inputs if isinstance(inputs, list) else [inputs]
    for x in received:
        if x is not None:
            x.retain_grad()
    pairs = [(get_gradient_edge(o), g) for o, g in zip(outputs, grads) if o.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
    if config.timers is not None:
        config.timers("backward-compute").stop()
    # What was received goes back in its shape, also where the stage has not read it.
    return [None if x is None else torch.zeros_like(x) if x.grad is None else x.grad for x in received]


def table() -> list[patches.Patch]:
    """The patches, which do nothing without the flag."""
    reason = f"{FLAG}: a stage sends several tensors"
    ours = {SHAPES: get_tensor_shapes, FORWARD_STEP: forward_step}
    return [patches.Patch(name, function, reason, patches.EVERYWHERE) for name, function in ours.items()]
