"""``--moe-fb-overlap``: the forward of one micro-batch runs beside the backward of another, by turns.

Compiled chunks hand over before each wait for a collective (:mod:`mindspeed_fx.training.turns`), so that the experts'
exchanges of one micro-batch are on their way while the other's products run. In DualPipeV's order the pairs are given;
in Megatron's own orders each forward of the steady state has the backward that follows it beside it, one more forward
being made ahead.
"""

from __future__ import annotations

from typing import Any, Callable

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.run_arguments import training_arguments
from mindspeed_fx.training import turns

COMBINED = "pipeline_parallel.combined_1f1b:combined_forward_backward_step"
ASKED = "mindspeed_fx_takes_turns"


def run(forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
    """What both return. The backward begins: its first message, the gradient of what came back from other ranks, needs
    no work before, and the forward's attention runs beside it."""
    return turns.run(forward, backward, _random(), second_begins=True)


def _random() -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """The states of random numbers, where the run draws some."""
    from megatron.core.tensor_parallel import random

    args = training_arguments()
    if args is not None and not (args.hidden_dropout or args.attention_dropout):
        return None
    return random._get_all_rng_states, lambda states: random._set_all_rng_states(*states)


def step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    f_model: Any,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    b_model: Any,
    b_input_tensor: Any,
    b_output_tensor: Any,
    b_output_tensor_grad: Any,
    config: Any,
    **others: Any,
) -> tuple[Any, Any, Any]:
    """``combined_forward_backward_step``: (output, number of tokens, gradient of the input), None where there is no
    such pass; Megatron's own but where :func:`prepare` was called.
    """
    forward = (forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, forward_data_store)
    backward = (b_input_tensor, b_output_tensor, b_output_tensor_grad)
    if not getattr(config, ASKED, False):
        return patches.original(COMBINED)(*forward, b_model, *backward, config, **others)
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    for has_pass, name in ((f_model, "pre_forward"), (b_model, "pre_backward")):
        if has_pass is not None and others.get(name) is not None:
            others[name]()
    calls = [lambda: _forward(*forward, config, others)] if f_model is not None else []
    if b_model is not None:
        calls.append(lambda: schedules.backward_step(*backward, ModelType.encoder_or_decoder, config))
    results = list(run(*calls)) if len(calls) == 2 else [call() for call in calls]
    output, tokens = results[0] if f_model is not None else (None, None)
    gradient = results[-1] if b_model is not None else None
    for has_pass, name, result in ((f_model, "post_forward", output), (b_model, "post_backward", gradient)):
        if has_pass is not None and others.get(name) is not None:
            others[name](result)
    return output, tokens, gradient


def _forward(*args: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import forward_step

    *forward, config, others = args
    chunk = others.get("f_model_chunk_id")
    return forward_step(
        *forward,
        config,
        parallel_state.get_context_parallel_world_size(),
        others.get("collect_non_loss_data", False),
        None,
        others.get("is_first_microbatch", False),
        others.get("current_microbatch"),
        vp_stage=chunk,
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
    )


def prepare(chunks: list[Any], by_megatron: bool) -> None:
    """Has the compiled chunks of a rank hand over at their waits; before they compile.

    Args:
        chunks: in Megatron's wrappers.
        by_megatron: pairs are those of Megatron's own schedules.
    """
    from megatron.core.utils import get_model_config

    for chunk in chunks:
        turns.mark(chunk.parameters())
        if by_megatron:
            config = get_model_config(chunk)
            config.overlap_moe_expert_parallel_comm = True
            setattr(config, ASKED, True)


def table() -> list[patches.Patch]:
    """The patch, which does nothing without the flag."""
    reason = "--moe-fb-overlap: chunks that are compiled take turns, where Megatron's overlap runs layers eagerly"
    return [patches.Patch(COMBINED, step, reason, patches.EVERYWHERE)]
