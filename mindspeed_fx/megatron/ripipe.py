"""``--recompute-in-advance``, ``--recompute-in-bubble``: chunks are recomputed while a rank waits for a gradient.

Recomputation needs no gradient, so that it need not wait for one. A chunk of Megatron's interleaved schedule runs its
forward without keeping what its backward reads; before the rank waits for the gradient of the next backward, the chunk
of that backward runs again, and keeps it. Chunks are what Megatron sends between ranks: those of one layer, as a rule.

In advance: every chunk whose layers would all be recomputed whole, but the last of the model, whose gradient nobody
sends. In the bubble: those alone beyond p v that are kept at once, of p ranks with v chunks: a rank r < p keeps
2 (p - r - 1) + (v - 1) p + 1 without it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable

import torch
from torch import Tensor

from mindspeed_fx.megatron import nanopipe, patches, several_tensors, tp_2d
from mindspeed_fx.megatron.dualpipev import schedule as dualpipev

SCHEDULE = "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving"
BACKWARD_STEP = "pipeline_parallel.schedules:backward_step"
MESSAGES = ("pipeline_parallel.p2p_communication:_batched_p2p_ops", "pipeline_parallel.p2p_communication:_p2p_ops")
ALWAYS, BEYOND = "in advance", "in bubble"

_running: "Run | nanopipe.Run | None" = None


class Pass:
    """The forward of one micro-batch through a chunk.

    Args:
        call: the chunk's own forward, without arguments.
        decoder: what holds the chunk's input, None for the first stage of a model.
    """

    def __init__(self, call: Callable[[], Tensor], decoder: Any) -> None:
        from megatron.core.tensor_parallel import random

        self.call, self.decoder, self.rng = call, decoder, random._get_all_rng_states()
        self.input: Tensor | None = decoder.input_tensor
        self.output: Tensor | None = None

    def recompute(self) -> None:
        """Run the chunk again, with what its backward reads; once."""
        from megatron.core.tensor_parallel import random

        if self.output is not None:
            return
        other = self.decoder.input_tensor
        if self.input is not None:
            self.input = self.input.detach().requires_grad_()
        with random._fork_rng(), torch.enable_grad():
            random._set_all_rng_states(*self.rng)
            self.decoder.input_tensor = self.input
            self.output = self.call()
        self.decoder.input_tensor = other


class _Recomputed(torch.autograd.Function):
    """The output of a chunk, whose backward is that of its recomputation."""

    @staticmethod
    def forward(ctx: Any, one: Pass, source: Tensor) -> Tensor:
        ctx.one = one
        with torch.no_grad():
            return one.call()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        one = ctx.one
        one.recompute()
        torch.autograd.backward(one.output, grads[0])
        gradient = None if one.input is None else one.input.grad
        one.output = one.input = ctx.one = None
        return None, gradient


class Run:
    """What one call of the schedule has done so far.

    Args:
        order: chunk of every backward.
        chunks: number of chunks here.
        limit: forwards that may be kept at once; None: none is.
        recomputed: of each chunk, whether it may be recomputed.
    """

    def __init__(self, order: list[int], chunks: int, limit: int | None, recomputed: list[bool]) -> None:
        self.order, self.limit, self.recomputed = order, limit, recomputed
        self.passes: list[deque[Pass | None]] = [deque() for _ in range(chunks)]
        self.done = self.kept = self.most = 0

    def forward(self, chunk: int, call: Callable[[], Any], decoder: Any) -> Any:
        is_kept = not self.recomputed[chunk] or (self.limit is not None and self.kept < self.limit)
        one = None if is_kept else Pass(call, decoder)
        self.passes[chunk].append(one)
        self.kept += is_kept
        self.most = max(self.most, self.kept)
        if one is None:
            return call()
        # without an input something else must call for a gradient
        source = torch.zeros((), requires_grad=True) if one.input is None else one.input
        return _Recomputed.apply(one, source)

    def next_pass(self) -> Pass | None:
        if self.done == len(self.order):
            return None
        waiting = self.passes[self.order[self.done]]
        return waiting[0] if waiting else None

    def begin_wait(self) -> None:
        """Before a gradient is waited for: the chunk that it is for runs again."""
        one = self.next_pass()
        if one is not None:
            one.recompute()

    def begin_backward(self) -> None:
        """Autograd asks for what is not there."""

    def end_backward(self) -> None:
        self.kept -= self.passes[self.order[self.done]].popleft() is None
        self.done += 1


class _Request:
    """A message that is waited for, before which the next backward's chunk is recomputed."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def wait(self) -> Any:
        if _running is not None:
            _running.begin_wait()
        return self.request.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


def messages(target: str) -> Callable[..., Any]:
    """``_batched_p2p_ops`` or ``_p2p_ops``: who waits for a gradient recomputes first."""

    def send_and_receive(*, tensor_recv_next: Tensor | None, **others: Any) -> Any:
        requests = patches.original(target)(tensor_recv_next=tensor_recv_next, **others)
        if _running is None or tensor_recv_next is None:
            return requests
        if isinstance(requests, dict):
            return {**requests, "recv_next": _Request(requests["recv_next"])}
        return [_Request(requests[0]), *requests[1:]]

    return send_and_receive


def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any) -> Any:
    """``backward_step``, which the run counts, or which begins at several tensors."""
    if several_tensors.has_several(output_tensor, output_tensor_grad):
        return several_tensors.backward_step(input_tensor, output_tensor, output_tensor_grad, config)
    args = (input_tensor, output_tensor, output_tensor_grad, model_type, config)
    if _running is not None:
        _running.begin_backward()
    result = patches.original(BACKWARD_STEP)(*args)
    if _running is not None:
        _running.end_backward()
    return result


def schedule(**kwargs: Any) -> Any:
    """``forward_backward_pipelining_with_interleaving`` with chunks that are recomputed early, or gradients of weights
    that are made late; or DualPipeV's order.
    """
    global _running
    chunks = kwargs["model"]
    kwargs = tp_2d.with_message_length(kwargs)
    if hasattr(chunks[0], "dualpipev"):
        return dualpipev.run(kwargs)
    if (queue := getattr(chunks[0], "late_gradients", None)) is not None and not kwargs.get("forward_only"):
        return _schedule_late(kwargs, queue)
    plan = getattr(chunks[0], "ripipe", None)
    if plan is None or kwargs.get("forward_only"):
        return patches.original(SCHEDULE)(**kwargs)
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.utils import get_model_config

    group = get_model_config(chunks[0]).microbatch_group_size_per_vp_stage
    table = get_schedule_table(kwargs["num_microbatches"], len(chunks), group)
    order = [len(chunks) - 1 - chunk for _, chunk in table]
    limit = None if plan == ALWAYS else len(chunks) * get_model_config(chunks[0]).pipeline_model_parallel_size
    _running = Run(order, len(chunks), limit, [chunk.is_recomputed for chunk in chunks])
    try:
        return patches.original(SCHEDULE)(**kwargs)
    finally:
        _running = None


def _schedule_late(kwargs: dict[str, Any], queue: Any) -> Any:
    global _running
    from megatron.core import parallel_state

    _running = run = nanopipe.Run(queue, parallel_state.get_pipeline_model_parallel_rank())
    try:
        return nanopipe.run_schedule(kwargs, run, patches.original(SCHEDULE))
    finally:
        _running = None


def prepare(chunks: list[Any], plan: str, whole: Callable[[Any], bool], unwrap: Callable[[Any], Any]) -> None:
    """Has the chunks of a rank recomputed early.

    Args:
        chunks: in Megatron's wrappers, in the order of their virtual stages.
        plan: ``ALWAYS`` or ``BEYOND``.
        whole: whether all layers of a GPTModel are to be recomputed.
        unwrap: the GPTModel of a chunk.
    """
    for number, chunk in enumerate(chunks):
        model = unwrap(chunk)
        chunk.ripipe, chunk.is_recomputed = plan, not model.post_process and whole(model)
        if chunk.is_recomputed:  # Megatron's own would recompute once more
            model.config.recompute_granularity = None
        chunk.forward = _early(chunk.forward, number, model.decoder)


def _early(forward: Callable[..., Any], number: int, decoder: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(_running, Run) or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return _running.forward(number, lambda: forward(*args, **kwargs), decoder)

    return run


def table() -> list[patches.Patch]:
    """The patches, which do nothing without the flags."""
    reason = "what flags run before a gradient is waited for: chunks again, or gradients of weights"
    replacements = {SCHEDULE: schedule, BACKWARD_STEP: backward_step, **{name: messages(name) for name in MESSAGES}}
    return [patches.Patch(name, ours, reason, patches.EVERYWHERE) for name, ours in replacements.items()]
