"""``generate(schedule, tokens, length)``: more tokens from a model whose layers are stages on several ranks.

    for stage in stages: stage.submod.eval()                  # a mode in which the model's last result is its logits
    tokens = mindspeed_fx.generate(schedule, prompt, 20, name="ids", labels=labels)

Every token is a forward of the whole sequence through all stages, by torch's schedule (``schedule.eval``): rows have
their full length from the beginning, so that one program serves all tokens, and what stands behind a token is not seen
by a causal model. The last stage's rank chooses, and tells the others. There is no cache of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_fx import arguments
from mindspeed_fx.compat import pipelining
from mindspeed_fx.planning.stage_module import Stage
from mindspeed_fx.sharding.plan import ShardingError

NONE = -1
"""No token."""


@torch.no_grad()
def generate(
    schedule: Any,
    tokens: torch.Tensor,
    length: int,
    *,
    name: str = "input_ids",
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``tokens`` with ``length`` more in each row, the same on every rank; every rank calls it.

    Args:
        schedule: of torch.distributed.pipelining, of stages from :func:`mindspeed_fx.pipeline_stages`, whose model is
            causal and gives in its present mode, as its only or its last result, logits [rows, sequence, vocabulary].
            Rows are a multiple of its microbatches; sizes that the stages do not know need
            :func:`mindspeed_fx.follow_shapes`.
        tokens: the beginning, integers [rows, sequence].
        length: how many tokens each row gets.
        name: of the model's argument for the tokens, [rows, sequence + length]; what is not yet known is 0.
        temperature: 0 takes the likeliest token; else one is drawn by softmax(logits / temperature).
        generator: of the random numbers; on the first rank of the last stage alone its state is used.
        kwargs: the model's other arguments, by name, for the whole length.

    Returns:
        integers [rows, sequence + length].

    Raises:
        ArgumentError: a wrong argument.
        ShardingError: the model gives no logits of every position.
    """
    own = pipelining.stages_of(schedule)
    if not own or not all(isinstance(getattr(s, "submod", None), Stage) for s in own):
        arguments.refuse("generate", "schedule", schedule, "one of stages from pipeline_stages is expected")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        arguments.refuse("generate", "tokens", tokens, "integers [rows, sequence] are expected")
    arguments.check_whole("generate", "length", length, least=0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature:
        arguments.refuse("generate", "temperature", temperature, "a number from 0 on is expected")
    known = tokens.shape[1]
    result = torch.cat((tokens, tokens.new_zeros(tokens.shape[0], length)), 1)
    for end in range(known, known + length):
        with pipelining.without_loss(schedule):
            out = schedule.eval(**{name: result, **kwargs})
        chosen = result.new_full((result.shape[0],), NONE)
        if any(s.is_last for s in own):
            logits = out[-1] if isinstance(out, (tuple, list)) else out
            if logits.dim() == 3 and logits.shape[:2] == result.shape:
                chosen = _choose(logits[:, end - 1], temperature, generator).to(result)
        result[:, end] = _share(chosen, own[0])
        if (result[:, end] == NONE).any():
            raise ShardingError(
                "generate: the model's last result is no logits of every position, "
                f"{(*result.shape, 'vocabulary')}: have it return them in the mode that its stages are in"
            )
    return result


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    if not temperature:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator)[:, 0]


def _share(chosen: torch.Tensor, stage: Any) -> torch.Tensor:
    """What the first rank of the last stage chose, on all ranks of the mesh."""
    last = stage.stage_index_to_group_rank[stage.num_stages - 1]
    dist.broadcast(chosen, src=dist.get_global_rank(stage.group, last), group=stage.group)
    for group in stage.inner_groups:  # the ranks that share this stage: their sums may differ in the last bit
        dist.broadcast(chosen, src=dist.get_global_rank(group, 0), group=group)
    return chosen
