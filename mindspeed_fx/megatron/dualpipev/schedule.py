"""DualPipeV's order for Megatron's chunks, in place of the interleaved schedule.

Gradients of weights are made with those of inputs, or late (``--dualpipev-dw-detach``), where the order says so; a
forward beside a backward runs before it, or in turns with it (``--moe-fb-overlap``). Sums over micro-batches have one
order, theirs, so that losses and gradients are those of the interleaved schedule.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_fx.compat import pipelining
from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import forward_beside_backward
from mindspeed_fx.megatron.dualpipev import placement
from mindspeed_fx.megatron.dualpipev.messages import Call, Mail, Message, message_of, share_losses
from mindspeed_fx.training.late_gradients import Queue, put_off

Order = list[tuple[Call, ...]]


def order_of(ranks: int, rank: int, microbatches: int, late: bool) -> Order:
    """Calls of a rank: torch's; where gradients of weights are not ``late``, each backward makes its own.

    Raises:
        OptionError: too few micro-batches.
    """
    if microbatches < 2 * ranks:
        raise OptionError(
            f"--schedules-method dualpipev: a step has {microbatches} micro-batches a rank; {2 * ranks}, two for each "
            "pipeline rank, are needed at least: give a larger --global-batch-size"
        )
    order = pipelining.orders_of("DualPipeV", ranks, 2 * ranks, microbatches)[rank]
    if late:
        return order
    whole = [tuple(("B" if kind == "I" else kind, *rest) for kind, *rest in calls) for calls in order]
    return [calls for calls in whole if calls[0][0] != "W"]


def forwards_of(ranks: int, rank: int, microbatches: int) -> Order:
    """Calls of a rank without backwards: stage s of micro-batch n at time 2 n + s, when its other stage has none."""
    calls = [("F", stage, number) for stage in (rank, 2 * ranks - 1 - rank) for number in range(microbatches)]
    return [(call,) for call in sorted(calls, key=lambda call: 2 * call[2] + call[1])]


class Step:
    """One call of the schedule on this rank.

    Args:
        kwargs: of ``forward_backward_pipelining_with_interleaving``.
        late: gradients of weights that wait; None: a backward makes its own.
        turns: a forward and a backward beside each other take turns.
    """

    def __init__(self, kwargs: dict[str, Any], late: Queue | None, turns: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config, get_model_type

        self.kwargs, self.late, self.turns = kwargs, late, turns
        self.chunks, self.forward_only = kwargs["model"], kwargs.get("forward_only", False)
        self.config, self.model_type = get_model_config(self.chunks[0]), get_model_type(self.chunks[0])
        group = parallel_state.get_pipeline_model_parallel_group()
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.members = dist.get_process_group_ranks(group)
        count = kwargs["num_microbatches"]
        if self.forward_only:
            orders = [forwards_of(self.ranks, r, count) for r in range(self.ranks)]
        else:
            orders = [order_of(self.ranks, r, count, late is not None) for r in range(self.ranks)]
        self.order = orders[self.rank]
        groups, has_shapes = (group, placement.mirrored_group()), self.config.variable_seq_lengths
        self.mail = Mail(orders, self.rank, self.members, groups, self._new_message, has_shapes)
        self.passes: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.held = _hold_reductions(self.config)
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())

    def _new_message(self, *shape: int) -> Tensor:
        """Of a shape, or of the run's; [seq of this rank, batch, hidden]."""
        from megatron.core import parallel_state

        length = self.kwargs["seq_length"] // parallel_state.get_context_parallel_world_size()
        if self.config.sequence_parallel:
            length //= parallel_state.get_tensor_model_parallel_world_size()
        shape = shape or (length, self.kwargs["micro_batch_size"], self.config.hidden_size)
        kind = {"device": torch.cuda.current_device(), "dtype": self.config.pipeline_dtype}
        return torch.empty(shape, **kind)

    def run(self) -> None:
        for calls in self.order:
            inputs = [self._receive(call) for call in calls]
            if len(calls) == 2 and self.turns:
                results = list(forward_beside_backward.run(*(self._bind(c, x) for c, x in zip(calls, inputs))))
            else:
                results = [self._bind(c, x)() for c, x in zip(calls, inputs)]
            for call, result in zip(calls, results):
                self._send(call, result)
        self.mail.finish()

    def _bind(self, call: Call, x: Tensor | None) -> Callable[[], Tensor | None]:
        kind, stage, number = call
        if kind == "W":
            assert self.late is not None
            return self.late.run_one
        return lambda: (self._forward if kind == "F" else self._backward)(kind, stage, number, x)

    def _receive(self, call: Call) -> Tensor | None:
        kind, stage, number = call
        if kind == "W" or stage == (0 if kind == "F" else 2 * self.ranks - 1):
            return None
        return self.mail.receive(Message("F" if kind == "F" else "B", stage, number))

    def _send(self, call: Call, result: Tensor | None) -> None:
        message = message_of(call, self.ranks)
        if message is None or result is None:
            return
        self.mail.send(message, result)
        if call[0] == "F" and not self.forward_only:
            from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

            deallocate_output_tensor(result, self.config.deallocate_pipeline_outputs)

    def _forward(self, kind: str, stage: int, number: int, x: Tensor | None) -> Tensor:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import check_first_val_step, forward_step

        chunk = int(stage >= self.ranks)
        if x is not None and not self.forward_only:
            x.requires_grad_()
        with placement.mirrored(chunk == 1):
            result, tokens = forward_step(
                self.kwargs["forward_step_func"],
                self.kwargs["data_iterator"][chunk],
                self.chunks[chunk],
                self.kwargs["num_microbatches"],
                x,
                self.losses,
                self.config,
                parallel_state.get_context_parallel_world_size(),
                self.kwargs.get("collect_non_loss_data", False),
                None,
                check_first_val_step(self.kwargs.get("first_val_step"), self.forward_only, number == 0),
                current_microbatch=number,
                vp_stage=chunk,
                is_last_stage=stage == 2 * self.ranks - 1,
            )
        self.tokens += tokens
        if not self.forward_only:
            self.passes[stage, number] = x, result
        return result

    def _backward(self, kind: str, stage: int, number: int, gradient: Tensor | None) -> Tensor | None:
        from megatron.core.pipeline_parallel import schedules

        source, output = self.passes.pop((stage, number))
        chunk = int(stage >= self.ranks)
        if number == self.kwargs["num_microbatches"] - 1 and chunk in self.held:
            self.held.pop(chunk).close()  # its buckets are reduced when their last gradients are there
        waiting = 0 if self.late is None else len(self.late)
        result = schedules.backward_step(source, output, gradient, self.model_type, self.config)
        if kind == "B" and self.late is not None:
            self.late.run_newest(len(self.late) - waiting)
        return result


def run(kwargs: dict[str, Any]) -> list[Any]:
    """What ``forward_backward_pipelining_with_interleaving`` returns, on every rank of the pipeline.

    Raises:
        OptionError: too few micro-batches.
    """
    chunks = kwargs["model"]
    step = Step(kwargs, chunks[0].dualpipev.late, chunks[0].dualpipev.turns)
    config = step.config
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    try:
        step.run()
    finally:
        for held in step.held.values():
            held.close()
    if not step.forward_only and config.finalize_model_grads_func is not None:
        _finalize(step)
    if config.timers is not None:
        config.timers("forward-backward").stop()
    if kwargs.get("collect_non_loss_data"):
        return step.losses
    return share_losses(step.losses, step.members, step.group)


def _hold_reductions(config: Any) -> dict[int, contextlib.ExitStack]:
    """Until it is closed, gradients of a chunk are summed and not reduced (``--overlap-grad-reduce``)."""
    functions = config.no_sync_func
    if functions is None:
        return {}
    functions = functions if isinstance(functions, list) else [functions]
    held = {}
    for chunk, no_sync in enumerate(functions):
        held[chunk] = contextlib.ExitStack()
        held[chunk].enter_context(no_sync())
    return held


def _finalize(step: Step) -> None:
    """Megatron's reductions of gradients, as of a pipeline whose last rank is this one's first."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    config, force = step.config, step.kwargs.get("force_all_reduce", False)
    tokens = step.tokens if config.calculate_per_token_loss else None
    with placement.mirrored():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config.finalize_model_grads_func(step.chunks, tokens, pg_collection=groups, force_all_reduce=force)
    placement.add_shared_gradients(step.chunks)


class Plan:
    """How the chunks of a rank are to run.

    Args:
        late: gradients of weights that wait.
        turns: forwards and backwards beside each other take turns.
    """

    def __init__(self, late: Queue | None, turns: bool) -> None:
        self.late, self.turns = late, turns


def prepare(chunks: list[Any], late: bool, turns: bool) -> None:
    """Has the chunks of a rank run in this order; before they compile.

    Args:
        chunks: in Megatron's wrappers.
        late: gradients of weights are put off.
        turns: forwards and backwards beside each other take turns.
    """
    plan = Plan(Queue() if late else None, turns)
    for chunk in chunks:
        chunk.dualpipev = plan
        if plan.late is not None:
            chunk.late_gradients = plan.late
            put_off(chunk.parameters(), plan.late)
    placement.tie(chunks)
