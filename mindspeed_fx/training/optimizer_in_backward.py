"""Option "optimizer": parameters take their step of AdamW inside the backward graph, each as soon as its gradient is
there.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    mindspeed_fx.step_in_backward(optimizer)
    step = torch.compile(model, backend="mindspeed", options={"optimizer": "backward"})
    step(x).backward()                                  # parameters have taken their step; their .grad stays None

As with data_parallel.py a parameter is read through a function that is the identity forward; backward it hands the
gradient, which may have been averaged over ranks before, to ``mindspeed::adamw_step`` and returns none. Weights,
moments and step counts are inputs that the graph changes. The state is that of the torch optimizer: its ``state_dict``,
its ``param_groups`` and schedulers of the learning rate go on working. :mod:`mindspeed_fx.passes.overlap.step` joins
the steps of a bucket.

Source: Lv et al. 2023, "Full parameter fine-tuning for large language models with limited resources" (gradients
    consumed as they become ready).
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import graph_inputs
from mindspeed_fx.errors import OptionError
from mindspeed_fx.kernels.adamw_step import NUMBERS
from mindspeed_fx.training import data_parallel

OWNER = "_mindspeed_fx_optimizer"
"""Attribute of a parameter: its optimizer and the number of its group."""
_REFUSED = ("amsgrad", "maximize", "differentiable", "capturable")


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Let graphs compiled with option "optimizer" step the parameters of ``optimizer``.

    Every backward is a step, so gradients are not accumulated over micro-batches, and nothing that needs all gradients
    before the first
    step can be had: no clipping by their norm (``clip_grad_norm_`` finds no gradients), no ``GradScaler``. Parameters
    that no such graph reads keep their gradients, and ``optimizer.step()`` steps those as ever.

    Args:
        optimizer: AdamW, or Adam without weight decay; any number of groups, frozen parameters too. State may be there
            already.

    Raises:
        ValueError: another optimizer, amsgrad, maximize, differentiable or capturable, parameters that are not
            contiguous, or that another optimizer steps.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Adam):
        raise ValueError(f"step_in_backward: the optimizer is {name}; valid: torch.optim.AdamW, torch.optim.Adam")
    for number, group in enumerate(optimizer.param_groups):
        if wrong := [k for k in _REFUSED if group.get(k)]:
            raise ValueError(f"step_in_backward: group {number} has {wrong[0]}=True; valid: False")
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ValueError(
                f"step_in_backward: group {number} of {name} has weight_decay={group['weight_decay']}, added to the "
                "gradient; valid: 0, or torch.optim.AdamW"
            )
        for p in group["params"]:
            if not p.is_contiguous():
                raise ValueError(
                    f"step_in_backward: a parameter of shape {list(p.shape)} in group {number} is not contiguous"
                )
            if getattr(p, OWNER, (optimizer, number)) != (optimizer, number):
                raise ValueError(
                    f"step_in_backward: a parameter of shape {list(p.shape)} in group {number} is stepped by another "
                    "optimizer"
                )
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            setattr(p, OWNER, (optimizer, number))


class Steps:
    """The parameters of one graph that step in its backward, and the inputs that this adds to the graph.

    Args:
        gm: a copy of Dynamo's graph, which gets further inputs in place.
        inputs: its inputs.

    Attributes:
        inputs: what it is traced with.

    Raises:
        OptionError: no trained parameter of the graph has an optimizer.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]):
        trained = data_parallel.parameters(inputs)
        self.positions = [i for i in trained if hasattr(inputs[i], OWNER)]
        if trained and not self.positions:
            raise OptionError(
                'option "optimizer" is "backward", and no parameter of the graph has an optimizer: call '
                "mindspeed_fx.step_in_backward(optimizer) first"
            )
        owners = [getattr(inputs[i], OWNER) for i in self.positions]
        self.groups: list[tuple[torch.optim.Optimizer, int]] = list(dict.fromkeys(owners))
        self.group = [self.groups.index(owner) for owner in owners]
        state = self.state([inputs[i] for i in self.positions])
        self.added = len(state)
        self.inputs = [*inputs, *graph_inputs.add_inputs(gm, state, "optimizer_state")]

    def state(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Moments and step count of every parameter, made where there are none, and the numbers of every group."""
        results = []
        for p, k in zip(parameters, self.group, strict=True):
            own = self.groups[k][0].state[p]
            if not own:
                own.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            results += [own["exp_avg"], own["exp_avg_sq"], own["step"]]
        for optimizer, number in self.groups:
            group = optimizer.param_groups[number]
            numbers = {**group, "beta1": group["betas"][0], "beta2": group["betas"][1]}
            results.append(torch.tensor([float(numbers[k]) for k in NUMBERS], dtype=torch.float64))
        return results

    def read(self, gm: fx.GraphModule) -> None:
        """Read the parameters through :func:`read_stepped`, in place."""
        added = gm.graph.find_nodes(op="placeholder")[len(self.inputs) - self.added :]
        groups = added[3 * len(self.positions) :]
        state = {
            i: (*added[3 * at : 3 * at + 3], groups[k])
            for at, (i, k) in enumerate(zip(self.positions, self.group, strict=True))
        }
        graph_inputs.read_through(gm, state, read_stepped)

    def wrap(self, compiled: Callable) -> Callable:
        """``compiled`` as a function of the graph's own inputs."""

        return graph_inputs.with_state(compiled, self.positions, self.state)


def read_stepped(
    parameter: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """``parameter``, which takes a step of AdamW when its gradient comes."""
    return _Stepped.apply(parameter, exp_avg, exp_avg_sq, step, numbers)


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        ctx.parameter, ctx.state = parameter, state  # not saved: autograd would refuse the change
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        exp_avg, exp_avg_sq, step, numbers = ctx.state
        torch.ops.mindspeed.adamw_step([ctx.parameter], [exp_avg], [exp_avg_sq], [step], [grad], [numbers])
        return None, None, None, None, None
