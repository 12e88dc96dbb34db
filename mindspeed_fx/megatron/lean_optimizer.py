"""Megatron's 16-bit optimizers whose float32 main weights are not held whole between steps.

What is kept of a main weight instead is a :class:`Keeper`'s matter (``residual.py``: 16 bits beside the 16-bit weight).
The optimizer steps in parts: the main weights of a part are made whole, stepped and let go before the next part, so
that no more than one part is whole at a time. Between steps a main weight is one NaN, expanded to its shape: what reads
it by a way that is not known here gets NaN and no stale value, what copies into it an error of torch.

A checkpoint holds main weights whole, in float32, as without this: it can be read either way.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Iterator, Protocol, Sequence

import torch
from torch import Tensor

from mindspeed_fx.errors import OptionError

MAIN_WEIGHTS = "fp32_from_fp16_params"
"""Megatron's key of the main weights in an optimizer's state."""


class Keeper(Protocol):
    """What is kept of one main weight between steps."""

    main: Tensor

    def prefetch(self) -> None:
        """Begin to make ``main`` whole."""

    def restore(self) -> None:
        """Make ``main`` whole."""

    def release(self) -> None:
        """Keep ``main``'s values, also as the 16-bit weight, and let its memory go."""

    def discard(self) -> None:
        """Let ``main``'s memory go with its values: those kept before hold."""

    def keep_states(self) -> None:
        """States of ``main`` were loaded or made outside of a step."""

    def float32(self) -> Tensor:
        """The values of ``main``, in memory that no step writes before it is asked to."""

    def settle(self) -> None:
        """Wait until what is kept can be read."""


def absent(weight: Tensor) -> Tensor:
    """One NaN in the shape of ``weight``, the same four bytes for all of a device; a single weight, into which torch
    could copy, has its own.
    """
    nan = _shared_nan if weight.numel() > 1 else _nan
    return nan(weight.dtype, weight.device).expand(weight.shape)


def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


_shared_nan = cache(_nan)


@dataclass
class Part:
    """Weights that are stepped together.

    Args:
        groups: groups of the optimizer and, of each, the weights in this part.
        numel: weights in it.
    """

    groups: list[tuple[dict[str, Any], list[Tensor]]]
    numel: int = 0

    @property
    def weights(self) -> list[Tensor]:
        return [weight for _, weights in self.groups for weight in weights]


def divide(param_groups: list[dict[str, Any]], count: int) -> list[Part]:
    """About ``count`` parts of equal size, in order; a weight is in one of them whole."""
    limit = sum(p.numel() for group in param_groups for p in group["params"]) / count
    parts: list[Part] = [Part([])]
    for group in param_groups:
        for weight in group["params"]:
            if parts[-1].numel and parts[-1].numel + weight.numel() > limit:
                parts.append(Part([]))
            part = parts[-1]
            if not part.groups or part.groups[-1][0] is not group:
                part.groups.append((group, []))
            part.groups[-1][1].append(weight)
            part.numel += weight.numel()
    return [part for part in parts if part.groups]


@contextlib.contextmanager
def only(optimizer: Any, part: Part, steps: dict[int, Any]) -> Iterator[None]:
    """``optimizer`` with the weights of ``part`` alone, its groups' numbers of steps as before the step."""
    groups, weights = optimizer.param_groups, [(group, group["params"]) for group, _ in part.groups]
    optimizer.param_groups = [group for group, _ in part.groups]
    for group, held in part.groups:
        group["params"] = held
        if steps[id(group)] is None:
            group.pop("step", None)
        else:
            group["step"] = copy.deepcopy(steps[id(group)])
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, whole in weights:
            group["params"] = whole


class LeanOptimizer:
    """What an optimizer of Megatron's does otherwise where main weights are kept by ``keepers``; before its class in
    the order of methods (:func:`make_lean`).
    """

    optimizer: Any
    keepers: dict[Tensor, Keeper]
    parts: int
    step_whole: Callable[[], Any]
    discards = False
    is_sharded = False

    def step_in_parts(self) -> None:
        """The inner optimizer's step, each part for itself: the same, for a step is each weight's own affair."""
        steps = {id(group): copy.deepcopy(group.get("step")) for group in self.optimizer.param_groups}
        parts = divide(self.optimizer.param_groups, self.parts)
        keepers = [[self.keepers[w] for w in p.weights if w in self.keepers and w.grad is not None] for p in parts]
        for part, held, following in zip(parts, keepers, [*keepers[1:], []]):
            with self.restored(held, following), only(self.optimizer, part, steps):
                self.step_whole()
        self.settle()

    def settle(self) -> None:
        """Wait until what the keepers keep can be read."""
        for keeper in list(self.keepers.values())[:1]:
            keeper.settle()

    @contextlib.contextmanager
    def restored(self, keepers: list[Keeper], following: Sequence[Keeper] = ()) -> Iterator[None]:
        """Main weights of some keepers whole, and on their way to it those that follow; what was written is kept."""
        for keeper in keepers:
            keeper.prefetch()
        for keeper in keepers:
            keeper.restore()
        for keeper in following:
            keeper.prefetch()
        try:
            yield
        finally:
            for keeper in keepers:
                keeper.discard() if self.discards else keeper.release()

    @contextlib.contextmanager
    def all_restored(self) -> Iterator[None]:
        """All main weights whole, for what is no step."""
        with self.restored(list(self.keepers.values())):
            yield
        self.settle()

    def float32_of(self, main: Tensor) -> Tensor:
        """A main weight's values: a copy where it is kept by a keeper."""
        return self.keepers[main].float32() if main in self.keepers else main

    # Megatron's methods

    def _copy_main_params_to_model_params(self) -> None:
        """A keeper has written the 16-bit weight."""

    def _copy_model_params_to_main_params(self, *args: Any, **kwargs: Any) -> None:
        with self.all_restored():
            super()._copy_model_params_to_main_params(*args, **kwargs)  # type: ignore[misc]

    def _init_optimizer_states_with_dummy_values(self) -> None:
        """A step with zeros, before a checkpoint is read, whose decay is not to reach the weights."""
        self.discards = True
        try:
            super()._init_optimizer_states_with_dummy_values()  # type: ignore[misc]
        finally:
            self.discards = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if MAIN_WEIGHTS in state:
            state[MAIN_WEIGHTS] = [[self.float32_of(main) for main in group] for group in state[MAIN_WEIGHTS]]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A sharded optimizer reads one shard at a time.
        with contextlib.nullcontext() if self.is_sharded else self.all_restored():
            super().load_state_dict(state_dict)  # type: ignore[misc]
        for keeper in self.keepers.values():
            keeper.keep_states()
        self.settle()


class LeanDistributedOptimizer(LeanOptimizer):
    """Beside ``DistributedOptimizer``, which reads and writes one shard at a time."""

    is_sharded = True

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)  # type: ignore[misc]
        return {**tensors, "param": self.float32_of(tensors["param"])}

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]  # type: ignore[attr-defined]
        main = self.optimizer.param_groups[group]["params"][order]
        with self.restored([self.keepers[main]] if main in self.keepers else []):
            super()._set_main_param_and_optimizer_states(model_param, tensors)  # type: ignore[misc]
        self.settle()

    def load_parameter_state_from_dp_zero_legacy(self, state_dict: Any) -> None:
        with self.all_restored():
            super().load_parameter_state_from_dp_zero_legacy(state_dict)  # type: ignore[misc]


@cache
def _lean_class(kind: type) -> type:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    mixin = LeanDistributedOptimizer if issubclass(kind, DistributedOptimizer) else LeanOptimizer
    return type(f"Lean{kind.__name__}", (mixin, kind), {"__module__": __name__})


def make_lean(optimizer: Any, flag: str, keepers_of: Callable[[Any], list[Keeper]], parts: int) -> Any:
    """The optimizer, but that main weights are held by keepers and stepped in about ``parts`` parts.

    Args:
        optimizer: what ``get_megatron_optimizer`` returns, before its first step; not to be used afterwards.
        flag: by which it is asked for, for the error.
        keepers_of: the keepers of an optimizer's main weights.

    Raises:
        OptionError: it is of a class whose main weights are not known here.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
    )

    if isinstance(optimizer, ChainedOptimizer):
        held = optimizer.chained_optimizers
        held[:] = [make_lean(inner, flag, keepers_of, parts) for inner in held]
        return optimizer
    valid = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if type(optimizer) not in valid:
        names = ", ".join(kind.__name__ for kind in valid)
        raise OptionError(f"{flag}: not done for {type(optimizer).__name__}; done for {names}; remove the flag")
    if optimizer.is_stub_optimizer:
        return optimizer
    # Python does not let an object change to a class with two bases.
    lean = object.__new__(_lean_class(type(optimizer)))
    vars(lean).update(vars(optimizer))
    lean.keepers = {keeper.main: keeper for keeper in keepers_of(lean)}
    lean.parts = parts
    lean.step_whole = lean.optimizer.step
    lean.optimizer.step = lean.step_in_parts
    lean.settle()
    return lean


def weight_pairs(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """(16-bit weight, or this rank's shard of it; main weight) of an optimizer of Megatron's."""
    prefix = "shard_" if hasattr(optimizer, "shard_float16_groups") else ""
    narrow = getattr(optimizer, f"{prefix}float16_groups", [])
    main = getattr(optimizer, f"{prefix}fp32_from_float16_groups", [])
    return [pair for groups in zip(narrow, main) for pair in zip(*groups)]
