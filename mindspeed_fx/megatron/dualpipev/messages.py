"""Hidden states and their gradients between the ranks of a pipeline in V shape.

A rank sends to the next and to the rank before it: down, forwards of first chunks and gradients of second ones; up, the
others. Each direction has a group of its own, in which messages have one order, the sender's, that the receiver knows
from the schedule: it begins to receive them in that order, up to the one that it waits for. No rank waits for a send.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Call = tuple[str, int, int]
"""Kind, stage, number of the micro-batch; kinds as in compat/pipelining."""


@dataclass(frozen=True)
class Message:
    """What a stage needs of its neighbour.

    Args:
        kind: "F", the input of its forward, or "B", the gradient of its output.
        stage: that reads it.
        number: of the micro-batch.
    """

    kind: str
    stage: int
    number: int


def rank_of(stage: int, ranks: int) -> int:
    """Where a stage lies."""
    return stage if stage < ranks else 2 * ranks - 1 - stage


def message_of(call: Call, ranks: int) -> Message | None:
    """What a call makes for another stage; None for gradients of weights and at both ends."""
    kind, stage, number = call
    if kind == "F" and stage < 2 * ranks - 1:
        return Message("F", stage + 1, number)
    if kind in "BI" and stage > 0:
        return Message("B", stage - 1, number)
    return None


def sent(order: Sequence[Sequence[Call]], source: int, target: int, ranks: int) -> list[Message]:
    """What ``source`` sends to ``target``, in its order; of two calls beside each other the first's is sent first."""
    messages = [message_of(call, ranks) for calls in order for call in calls]
    return [m for m in messages if m is not None and rank_of(m.stage, ranks) == target != source]


class Mail:
    """The messages of one call of the schedule.

    Args:
        orders: of every rank, by rank.
        rank: this one's number in the pipeline.
        members: numbers of the pipeline's ranks in the whole job.
        groups: for messages down and up.
        new: an empty tensor for a message, of the shape that the run's lengths give, or of another.
        has_shapes: a message's shape is sent before it (``--variable-seq-lengths``).
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Sequence[Call]]],
        rank: int,
        members: Sequence[int],
        groups: tuple[Any, Any],
        new: Callable[..., Tensor],
        has_shapes: bool = False,
    ) -> None:
        self.rank, self.ranks, self.members, self.groups, self.new = rank, len(orders), members, groups, new
        self.has_shapes = has_shapes
        self.expected = {
            other: deque(sent(orders[other], other, rank, len(orders)))
            for other in (rank - 1, rank + 1)
            if 0 <= other < len(orders)
        }
        self.coming: dict[Message, tuple[Any, Tensor]] = {}
        self.here: dict[Message, Tensor] = {}
        self.leaving: deque[tuple[Any, Tensor]] = deque()

    def send(self, message: Message, x: Tensor) -> None:
        """To the rank of its stage, which may be this one."""
        target = rank_of(message.stage, self.ranks)
        x = x.detach()
        if target == self.rank:
            self.here[message] = x
            return
        while self.leaving and self.leaving[0][0].is_completed():
            self.leaving.popleft()
        group = self.groups[target < self.rank]
        shape = [torch.tensor(x.shape, device=x.device)] if self.has_shapes else []
        for sent_now in (*shape, x.contiguous()):
            self.leaving.append((dist.isend(sent_now, self.members[target], group=group), sent_now))

    def receive(self, message: Message) -> Tensor:
        """Wait for it."""
        if message in self.here:
            return self.here.pop(message)
        source = rank_of(message.stage + (-1 if message.kind == "F" else 1), self.ranks)
        waiting = self.expected[source]
        while message not in self.coming:
            group = self.groups[source > self.rank]
            buffer = self.new(*self._receive_shape(self.members[source], group))
            request = dist.irecv(buffer, self.members[source], group=group)
            self.coming[waiting.popleft()] = request, buffer
        request, buffer = self.coming.pop(message)
        request.wait()
        return buffer

    def _receive_shape(self, source: int, group: Any) -> tuple[int, ...]:
        """Of the next message; empty where all have one shape."""
        if not self.has_shapes:
            return ()
        shape = torch.empty(3, dtype=torch.int64, device=_device())
        dist.recv(shape, source, group=group)
        return tuple(shape.tolist())

    def finish(self) -> None:
        """All that was sent has left."""
        while self.leaving:
            self.leaving.popleft()[0].wait()


def share_losses(losses: list[dict[str, Tensor]], members: Sequence[int], group: Any) -> list[dict[str, Tensor]]:
    """What the first rank has reported of its micro-batches, on every rank of the pipeline: Megatron logs on the last.

    Args:
        losses: of each micro-batch, by name; empty where the last stage is not.
    """
    told = [[{name: x.detach().cpu() for name, x in one.items()} for one in losses]]
    dist.broadcast_object_list(told, src=members[0], group=group)
    if losses:
        return losses
    return [{name: x.to(_device()) for name, x in one.items()} for one in told[0]]


def _device() -> torch.device:
    from mindspeed_fx.megatron.groups import current_device

    return current_device()
