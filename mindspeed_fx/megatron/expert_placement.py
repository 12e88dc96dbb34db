"""``--enable-expert-placement``: experts change ranks during a run, so that ranks have as many tokens as each other.

A rank has as many slots as experts; a router chooses experts, and a layer's table says which expert a slot holds. Every
``--expert-placement-freq`` iterations the experts with the most tokens are placed first, each on the rank that has the
fewest so far and a free slot; their weights, main weights and optimizer states move to the slots there. Tokens of an
expert are a mean over iterations, 0.9 of it the one before (MindSpeed's). Results are those of the run without it, but
for the order of sums. Checkpoints hold experts where Megatron places them: they move back before one is written.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import collectives, dispatch

FLAG = "--enable-expert-placement"
KEPT = 0.9


def is_asked(layer: Any) -> bool:
    """Whether a layer of experts has a table of slots, or counts its tokens."""
    return hasattr(layer, "expert_tokens")


def prepare(model: Any, args: Namespace) -> None:
    """Give every layer of experts of a GPTModel, or of a stage of one, its table.

    Raises:
        OptionError: its experts are of another kind than Megatron's SequentialMLP.
    """
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        if not dispatch.is_needed(layer):
            continue
        if type(layer.experts) is not SequentialMLP:
            raise OptionError(f"{FLAG}: experts are a {type(layer.experts).__name__}; remove the flag")
        number, device = layer.config.num_moe_experts, next(layer.parameters()).device
        layer.register_buffer("expert_of_slot", torch.arange(number, device=device), persistent=False)
        layer.register_buffer("expert_tokens", torch.zeros(number, dtype=torch.int64, device=device), persistent=False)
        layer.mean_tokens = torch.zeros(number, dtype=torch.float64)


def by_slot(layer: Any, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """A router's choice [tokens, experts] by slots, which are in order of the ranks; the tokens are counted."""
    if layer.training and torch.is_grad_enabled():  # once where a layer is recomputed, as Megatron counts
        layer.expert_tokens.add_(routing_map.sum(0))
    return probs.index_select(1, layer.expert_of_slot), routing_map.index_select(1, layer.expert_of_slot)


def choose(tokens: list[float], ranks: int, before: list[int]) -> list[int]:
    """Which expert a slot holds, for mean tokens of every expert.

    >>> choose([9, 1, 8, 2], 2, [0, 1, 2, 3])
    [0, 1, 2, 3]
    >>> choose([9, 8, 1, 2], 2, [0, 1, 2, 3])
    [0, 2, 1, 3]
    """
    local = len(tokens) // ranks
    load, placed = [0.0] * ranks, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for expert in sorted(range(len(tokens)), key=lambda e: (-tokens[e], e)):
        rank = min((r for r in range(ranks) if len(placed[r]) < local), key=lambda r: (load[r], r))
        placed[rank].append(expert)
        load[rank] += tokens[expert]
    slots = []
    for rank, experts in enumerate(placed):
        old = before[rank * local : (rank + 1) * local]
        coming = iter(sorted(e for e in experts if e not in old))
        slots += [e if e in experts else next(coming) for e in old]
    return slots


def loads(tokens: list[float], ranks: int, slots: list[int]) -> list[float]:
    """Mean tokens of every rank."""
    local = len(tokens) // ranks
    return [sum(tokens[e] for e in slots[r * local : (r + 1) * local]) for r in range(ranks)]


def variation(values: list[float]) -> float:
    """The standard deviation over the mean."""
    x = torch.tensor(values, dtype=torch.float64)
    return float(x.std() / x.mean()) if x.mean() > 0 else 0.0


def _layers(model: list[Any]) -> list[Any]:
    return [m for chunk in model for m in chunk.modules() if is_asked(m)]


@torch.no_grad()
def after_step(model: list[Any], optimizer: Any, args: Namespace, iteration: int) -> None:
    """After an iteration: counts, prints and places."""
    from megatron.core import parallel_state

    is_due = args.enable_expert_placement and iteration % args.expert_placement_freq == 0
    for number, layer in enumerate(_layers(model)):
        counted = collectives.all_reduce(layer.expert_tokens, layer.ep_group)
        if parallel_state.get_expert_data_parallel_world_size() > 1:  # ranks with the same experts place them alike
            counted = collectives.all_reduce(counted, parallel_state.get_expert_data_parallel_group())
        counted = counted.cpu().double()
        layer.expert_tokens.zero_()
        layer.mean_tokens = KEPT * layer.mean_tokens + (1 - KEPT) * counted
        tokens, ranks = layer.mean_tokens.tolist(), layer.ep_group.size()
        before = layer.expert_of_slot.tolist()
        if is_due:
            after = choose(tokens, ranks, before)
            gain = variation(loads(tokens, ranks, before)) - variation(loads(tokens, ranks, after))
            least = args.fine_grained_expert_placement_thre if args.enable_fine_grained_expert_placement else 0.0
            if gain > least:
                move(layer, optimizer, after)
        if args.print_expert_load and layer.ep_group.rank() == 0 and iteration % args.log_interval == 0:
            now = loads(tokens, ranks, layer.expert_of_slot.tolist())
            print(
                f"mindspeed_fx: iteration {iteration}, layer {number} of experts: tokens of ranks {min(now):.1f} to "
                f"{max(now):.1f}, {[round(n, 1) for n in now]}",
                flush=True,
            )


def after_train_step(args: Namespace, model: list[Any], optimizer: Any) -> None:
    """After Megatron's ``train_step``, where the flags ask for it."""
    if getattr(args, "enable_expert_placement", False) or getattr(args, "print_expert_load", False):
        after_step(model, optimizer, args, args.curr_iteration + 1)


def restore(model: list[Any], optimizer: Any) -> None:
    """Experts where Megatron places them."""
    for layer in _layers(model):
        move(layer, optimizer, list(range(len(layer.expert_of_slot))))


@torch.no_grad()
def move(layer: Any, optimizer: Any, after: list[int]) -> None:
    """Weights and optimizer states of experts to the slots of a new table."""
    before, group = layer.expert_of_slot.tolist(), layer.ep_group
    if before == after:
        return
    local, rank = len(before) // group.size(), group.rank()
    goes = [after.index(e) for e in before[rank * local : (rank + 1) * local]]
    comes = [before.index(e) for e in after[rank * local : (rank + 1) * local]]
    leaving = sorted(range(local), key=lambda i: goes[i])
    arriving = sorted(range(local), key=lambda i: (comes[i] // local, i))
    sent = [sum(g // local == r for g in goes) for r in range(group.size())]
    received = [sum(c // local == r for c in comes) for r in range(group.size())]
    experts = layer.experts.local_experts
    for name, _ in experts[0].named_parameters():
        kept = [Kept(dict(e.named_parameters())[name], optimizer) for e in experts]
        for number in range(len(kept[0].tensors)):
            rows = torch.stack([kept[i].whole(number) for i in leaving])
            new = torch.empty_like(rows)
            dist.all_to_all_single(new, rows, received, sent, group=group)
            for row, i in zip(new, arriving, strict=True):
                kept[i].put(number, row)
    layer.expert_of_slot.copy_(torch.tensor(after))


class Kept:
    """A weight, its main weight and what the optimizer keeps of it, in the same order for every expert.

    Args:
        weight: of an expert.
        optimizer: Megatron's, or one with an attribute ``optimizer``; of a distributed one this rank may have a part of
            each tensor, or none, and the other ranks with the same experts the rest.
    """

    def __init__(self, weight: Tensor, optimizer: Any) -> None:
        self.weight, self.group, self.place = weight, None, slice(0, weight.numel())
        main: Any = getattr(weight, "main_param", weight)
        state: dict[str, Any] = {}
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if _is_divided(part, weight):
                self.group = part.data_parallel_group
                main, self.place = _part_of(part, weight)
            state = part.optimizer.state.get(main) or state
        if self.group is not None:
            keys, is_main_apart = [*MOMENTS], weight.dtype != torch.float32
        else:
            keys = sorted(key for key in state if isinstance(state[key], Tensor) and state[key].dim())
            is_main_apart = main.data_ptr() != weight.data_ptr()
        self.tensors = [weight.data, *([main] if is_main_apart else []), *(state.get(key) for key in keys)]

    def whole(self, number: int) -> Tensor:
        """A tensor in one dimension, put together from the ranks that have its parts."""
        tensor = self.tensors[number]
        if number == 0 or self.group is None:
            return tensor.reshape(-1)
        full = torch.zeros(self.weight.numel(), device=self.weight.device)
        if tensor is not None:
            full[self.place] = tensor.reshape(-1)
        dist.all_reduce(full, group=self.group)
        return full

    def put(self, number: int, row: Tensor) -> None:
        """The values of another expert, this rank's part of them."""
        tensor = self.tensors[number]
        if tensor is not None:
            own = row if number == 0 or self.group is None else row[self.place]
            tensor.copy_(own.view(tensor.shape))


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What a distributed optimizer keeps of a weight, on the rank that has its part."""


def _is_divided(part: Any, weight: Tensor) -> bool:
    """Whether ``part`` is a distributed optimizer of the buffer that ``weight`` lies in."""
    buffers = getattr(part, "buffers", None) or []
    return hasattr(part, "model_param_gbuf_map") and any(weight in b.param_to_bucket for b in buffers)


def _part_of(part: Any, weight: Tensor) -> tuple[Tensor | None, slice]:
    """This rank's part of the main weight, and where it lies in the weight; None and nothing where it has none."""
    if weight not in part.model_param_gbuf_map:
        return None, slice(0, 0)
    group, index = part.model_param_group_index_map[weight]
    place = part._get_model_param_range_map(weight)["param"]
    return part.optimizer.param_groups[group]["params"][index], slice(place.start, place.end)
