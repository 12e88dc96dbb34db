"""Loops of training that scenarios share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returned, or the distance of all that it returned from numbers that differ, so that no
    part can be exchanged for another."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    leaves = torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
    weights = (torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape) for t in tensors)
    return sum((t - w).square().mean() for t, w in zip(tensors, weights, strict=True))


def train(
    run: Any,
    model: torch.nn.Module,
    inputs: dict[str, Any] | tuple[Any, ...],
    steps: int = 2,
    lr: float = 0.05,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    **how: Any,
) -> dict[str, Any]:
    """Steps of SGD of a compiled model: every loss, and the gradients of the last step by parameter."""
    compiled = run.compile(model, **how)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = compiled(*inputs) if isinstance(inputs, tuple) else compiled(**inputs)
        value = loss(output)
        value.backward()
        losses.append(value.detach())
        optimizer.step()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": grads}


def widen_batch_normed(model: torch.nn.Module, images: torch.Tensor) -> tuple[torch.nn.Module, torch.Tensor]:
    """Both in float64 where the model has batch norms: over few values and a ReLU's edge they make much of rounding."""
    if any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()):
        return model.double(), images.double()
    return model, images


def infer(run: Any, model: torch.nn.Module, inputs: dict[str, Any] | tuple[Any, ...], **how: Any) -> Any:
    """Outputs of a compiled model, twice with other inputs of the same sizes, without gradients."""
    compiled = run.compile(model.eval(), **how)
    outputs = []
    for scale in (1.0, 0.5):
        scaled = torch.utils._pytree.tree_map(
            lambda x: x * scale if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs
        )
        with torch.no_grad():
            output = compiled(*scaled) if isinstance(scaled, tuple) else compiled(**scaled)
        outputs.append(tensors_of(output))
    return outputs


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return {str(i): t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
