"""torch.distributed.pipelining's stages and schedules, where their own interface ends."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import torch
from torch.distributed.pipelining import PipelineStage


class PartedStage(PipelineStage):
    """A stage whose module leaves the gradients of its weights to the schedule where that asks for those of its input
    alone, and makes both at once where it asks for both. (torch has the one or the other: with ``dw_builder`` all
    backwards come in parts, without it each part runs the whole of a compiled backward.)

    Evaluation keeps no graph, leaves gradients alone, and runs with two neighbouring stages on a rank; torch's own
    divides the gradients that are there, and asks the later one of the two for the gradient of its input (2.13).

    Args:
        late: with ``in_parts``, whether backwards leave something, and ``take()``, which makes what the last one left.
    """

    def __init__(self, *args: Any, late: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.late = late
        self.inner_groups: list[Any] = []
        """Groups of this rank on the mesh dimensions that divide the stage."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.has_backward and torch.is_grad_enabled()):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.late.in_parts, self.dw_builder = not full_backward, None if full_backward else self.late.take
        try:
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        finally:
            self.late.in_parts, self.dw_builder = False, None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            self.dw_runner.pop(bwd_chunk_id)()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Not those between two stages of this rank, which gloo refuses (2.11 asks for them)."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """What goes to no other stage has any shape, as the results in evaluation of a model whose training gives
        losses. (From torch 2.12 on nobody asks.)"""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def take_sizes(self, inputs: tuple, outputs: tuple) -> None:
        """Tensors like those that come and go from the next step on; see :func:`forget_sizes`."""
        fresh = PipelineStage(
            self.submod, self.stage_index, self.num_stages, self.device, inputs, outputs, group=self.group
        )
        for name in ("_user_meta", "inputs_meta", "_outputs_meta"):  # the first from torch 2.12 on, the others before
            if hasattr(fresh, name):
                setattr(self, name, getattr(fresh, name))
        self._inference_mode = None
        self.args_recv_info, self.grad_recv_info, self.grad_send_info = {}, {}, None


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule of this rank."""
    one = getattr(schedule, "_stage", None)
    return list(getattr(schedule, "_stages", [] if one is None else [one]))


def before_steps(schedule: Any, function: Callable[[tuple, dict], None]) -> None:
    """Call ``function(args, kwargs)`` of the first microbatch before each step of ``schedule``."""
    run = schedule._step_microbatches

    def step(arg_mbs: Any = None, kwarg_mbs: Any = None, *args: Any, **kwargs: Any) -> Any:
        function(*((mbs[0] if mbs else empty) for mbs, empty in ((arg_mbs, ()), (kwarg_mbs, {}))))
        return run(arg_mbs, kwarg_mbs, *args, **kwargs)

    schedule._step_microbatches = step


def forget_sizes(schedule: Any) -> None:
    """Have the next step ask its stages for sizes again, and make what it receives into anew."""
    for name in vars(schedule):
        if name.endswith(("_forward_initialized", "_backward_initialized")):
            setattr(schedule, name, False)


@contextlib.contextmanager
def without_loss(schedule: Any) -> Iterator[None]:
    """Steps that compute no loss, and need no target."""
    own, schedule._loss_fn = schedule._loss_fn, None
    try:
        yield
    finally:
        schedule._loss_fn = own


KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
"""Torch's words for what :mod:`mindspeed_fx.cost.pipeline` plays."""


def orders_of(name: str, ranks: int, stages: int, microbatches: int) -> list[list[tuple[tuple[str, int, int], ...]]]:
    """What each rank does in a step of torch's schedule ``name``, in order: groups of (kind, stage, microbatch), whose
    results are sent when all of a group is done (a forward beside a backward); without processes. (Not of 1F1B, whose
    description in torch 2.13 leaves out the last rank's first microbatch.)

    Raises:
        ValueError: torch's, for numbers that the schedule does not take.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    if issubclass(kind, PipelineScheduleSingle):
        schedule = kind.__new__(kind)
        schedule._num_stages, schedule._n_microbatches = stages, microbatches
        order = schedule._get_pipeline_order()
    else:
        shape = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "submod": None}
        order = kind(
            [SimpleNamespace(stage_index=i, **shape) for i in range(stages // ranks)], microbatches
        ).pipeline_order
    results = []
    for r in range(ranks):
        actions = [a.sub_actions or (a,) for a in order[r] if a is not None]
        groups = [[a for a in group if a.computation_type.name in KINDS] for group in actions]
        named = [tuple((KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in g) for g in groups]
        results.append([group for group in named if group])
    return results
