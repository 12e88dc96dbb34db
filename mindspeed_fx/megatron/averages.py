"""An exponential moving average of the weights, kept by Adam and saved beside the model.

After step n the average becomes d a + (1 - d) w, with d = min(``--ema-decay``, (1 + n) / (10 + n)), as MindSpeed's
``--optimizer-selection fused_ema_adamw`` has it. It is a state of the optimizer, in the type of the weights that Adam
steps; a checkpoint of ``--ckpt-format torch`` has the averaged model under ``ema_model`` (``ema_model0`` ... of several
chunks), and the distributed optimizer's file has the averages themselves.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from torch import Tensor
from torch.utils import _pytree as pytree

from mindspeed_fx.megatron import expert_placement, patches, sliced_states
from mindspeed_fx.megatron.optimizer import AVERAGE, adams_of

SAVE = "megatron.training.checkpointing:save_checkpoint"
GENERATE = "megatron.training.checkpointing:generate_state_dict"

_models: list[dict[str, Any]] = []
"""What the checkpoint that is being saved gets beside the model."""


def keep_averages(optimizer: Any, decay: float) -> None:
    """Let ``optimizer``, Megatron's, keep the average of every weight that it steps: 4 bytes a weight more.

    Raises:
        ValueError: the optimizer is another package's.
    """
    for part in adams_of(optimizer, "--optimizer-selection fused_ema_adamw is", "--optimizer adam"):
        part.optimizer.average_decay = decay


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _has_averages(part: Any) -> bool:
    """Not of an optimizer that steps no parameters, or is a caller's own."""
    return getattr(getattr(part, "optimizer", None), "average_decay", None) is not None


@contextlib.contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """The model's weights are the averages within; all ranks enter together, and leave with the bits of before."""
    weights = [
        (p, part.optimizer.state[p][AVERAGE], p.detach().to("cpu", copy=True))
        for part in _parts(optimizer)
        for group in part.optimizer.param_groups
        for p in group["params"]
        if AVERAGE in part.optimizer.state.get(p, {})
    ]
    try:
        for p, average, _ in weights:
            p.data.copy_(average)
        _hand_to_model(optimizer)
        yield
    finally:
        for p, _, before in weights:
            p.data.copy_(before)
        _hand_to_model(optimizer)


def _hand_to_model(optimizer: Any) -> None:
    """Weights that are stepped apart from the model's own go there; divided ones are gathered."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for part in _parts(optimizer):
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
        if isinstance(part, DistributedOptimizer):
            for chunk in part.model_chunks:
                chunk.start_param_sync(force_sync=True)


# --------------------------------------------------------------------------- checkpoints


def save_checkpoint(iteration: int, model: list[Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_checkpoint``, which also saves the averaged model; experts are where Megatron places them."""
    save = patches.original(SAVE)
    expert_placement.restore(model, optimizer)
    if optimizer is None or not any(map(_has_averages, _parts(optimizer))):
        return save(iteration, model, optimizer, *args, **kwargs)
    with averaged(optimizer):
        states = [_on_host(chunk.state_dict_for_save_checkpoint()) for chunk in model]
    _models.append({f"ema_model{i if len(states) > 1 else ''}": state for i, state in enumerate(states)})
    try:
        return save(iteration, model, optimizer, *args, **kwargs)
    finally:
        _models.pop()


def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """``generate_state_dict``, with the averaged model of the checkpoint that is being saved."""
    return {**patches.original(GENERATE)(*args, **kwargs), **(_models[-1] if _models else {})}


def _on_host(state: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)


def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``DistributedOptimizer.get_parameter_state_dp_zero``, with the averages: Megatron gathers three tensors by name,
    so that they are gathered once more in the place of the first moments."""
    get = sliced_states.get
    state = get(self, *args, **kwargs)
    if not _has_averages(self):
        return state
    with _as_moments(self):
        averages = get(self, *args, **kwargs)
    for buffer, dtype, tensors in _tensors(averages):
        state[buffer][dtype][AVERAGE] = tensors["exp_avg"]
    return state


def load_parameter_state_from_dp_zero(self: Any, state_dict: Any, **kwargs: Any) -> None:
    """``DistributedOptimizer.load_parameter_state_from_dp_zero``, with the averages; a checkpoint without them gives
    the weights."""
    load = sliced_states.load
    if not _has_averages(self):
        return load(self, state_dict, **kwargs)
    replaced = None if state_dict is None else {k: v for k, v in state_dict.items() if not isinstance(v, dict)}
    for buffer, dtype, tensors in _tensors(state_dict):
        average = tensors.get(AVERAGE, tensors["param"])
        replaced.setdefault(buffer, {})[dtype] = {**tensors, "exp_avg": average}
    with _as_moments(self):
        load(self, replaced, **kwargs)
    states = _states(self)
    averages = [state.pop(AVERAGE) for state in states]  # Megatron asks the file for every state there is
    load(self, state_dict, **kwargs)
    for state, average in zip(states, averages, strict=True):
        state[AVERAGE] = average


def _tensors(state: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Buffer, dtype and tensors of a gathered state; none on ranks that have none."""
    for buffer, by_dtype in (state or {}).items():
        if isinstance(by_dtype, dict):
            yield from ((buffer, dtype, tensors) for dtype, tensors in by_dtype.items() if "exp_avg" in tensors)


@contextlib.contextmanager
def _as_moments(part: Any) -> Iterator[None]:
    """Averages stand where the first moments are."""
    states, moments = _states(part), [state["exp_avg"] for state in _states(part)]
    for state in states:
        state["exp_avg"] = state.pop(AVERAGE)
    try:
        yield
    finally:
        for state, moment in zip(states, moments, strict=True):
            state[AVERAGE], state["exp_avg"] = state["exp_avg"], moment


def _states(part: Any) -> list[dict[str, Tensor]]:
    """Of every weight, with an average: its own value where there was no step yet."""
    parameters = [p for group in part.optimizer.param_groups for p in group["params"]]
    for p in parameters:
        part.optimizer.state[p].setdefault(AVERAGE, p.detach().clone())
    return [part.optimizer.state[p] for p in parameters]
