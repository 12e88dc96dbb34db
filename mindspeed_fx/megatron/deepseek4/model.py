"""DeepSeek-V4's parts on a GPTModel: streams from the embedding to the last norm, tokens for tables of experts.

Multi-token prediction begins with what the streams have become, before the model's last norm (Megatron: after it), and
its layer has streams of its own.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import Tensor

from mindspeed_fx.megatron import sparse_attention, square_root_router
from mindspeed_fx.megatron.deepseek4 import layer, streams
from mindspeed_fx.megatron.deepseek4.settings import Settings, settings_of


def with_layers(args: tuple, kwargs: dict[str, Any], flags: Namespace) -> tuple[tuple, dict[str, Any]]:
    """Arguments of ``GPTModel.__init__`` whose layers are DeepSeek-V4's."""
    settings = settings_of(flags)
    changed = {
        name: layer.make_layers(kwargs[name], settings)
        for name in ("transformer_layer_spec", "mtp_block_spec")
        if name in kwargs
    }
    if "transformer_layer_spec" not in kwargs:
        args = (args[0], layer.make_layers(args[1], settings), *args[2:])
    return args, {**kwargs, **changed}


def add_parts(model: Any, args: Namespace) -> None:
    """Put on a GPTModel, or on a stage of one, what is around its layers.

    Raises:
        ValueError: layers with a table of experts are on a stage that is not told the tokens.
    """
    settings = settings_of(args)
    model.config.hetereogenous_dist_checkpoint = True  # layers are of several kinds: a checkpoint has them one by one
    sparse_attention.prepare_log(model.config)
    if model.pre_process:
        model.decoder.register_forward_pre_hook(_repeat(settings), with_kwargs=True)
    _replace_last_norm(model, settings)
    for ahead in _layers_ahead(model):
        ahead.hc_head = streams.StreamsHead(model.config, settings)
        ahead.transformer_layer.register_forward_pre_hook(_repeat(settings), with_kwargs=True)
        ahead.transformer_layer.register_forward_hook(_collapse_layer(ahead.hc_head))
    tables = [n for n in model.decoder.layers if n.layer_number <= args.table_layers]
    if tables and not model.pre_process:
        raise ValueError(
            f"--n-hash-layers {args.n_hash_layers}: layer {tables[-1].layer_number} is on a stage that is not told the "
            "tokens; place such layers on the first stage"
        )
    for with_table in tables:
        square_root_router.add_table(with_table.mlp, args.padded_vocab_size)
    if tables:
        model.register_forward_pre_hook(_hand_on_tokens, with_kwargs=True)


def _layers_ahead(model: Any) -> list[Any]:
    return list(model.mtp.layers) if getattr(model, "mtp", None) is not None else []


def _replace_last_norm(model: Any, settings: Settings) -> None:
    """The last norm is where the loss is, behind multi-token prediction and on one stream."""
    from megatron.core.transformer.spec_utils import build_module

    config = model.config
    model.decoder.final_layernorm = None
    if bool(model.mtp_process) and not model.post_process:
        raise ValueError(
            "--pipeline-model-parallel-layout: multi-token prediction is on another stage than the loss; place m and L "
            "together"
        )
    if not model.post_process:
        return
    model.hc_head = streams.StreamsHead(config, settings)
    model.final_layernorm = build_module(
        model.decoder.submodules.layer_norm,
        config=config,
        hidden_size=config.hidden_size,
        eps=config.layernorm_epsilon,
    )
    if not model.mtp_process:
        model.decoder.register_forward_hook(lambda module, inputs, out: model.final_layernorm(model.hc_head(out)))
        return
    model.decoder.register_forward_hook(lambda module, inputs, out: model.hc_head(out))
    model.mtp.register_forward_hook(_norm_first(model))


def _norm_first(model: Any) -> Any:
    """Of what multi-token prediction returns, one behind the other, the model's own part is not normed yet."""
    from torch import cat

    def hook(module: Any, inputs: tuple, out: Tensor) -> Tensor:
        own, *ahead = out.chunk(1 + len(module.layers))
        return cat([model.final_layernorm(own), *ahead])

    return hook


def _repeat(settings: Settings) -> Any:
    def hook(module: Any, inputs: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if kwargs.get("hidden_states") is None:
            return (streams.repeat(inputs[0], settings.streams), *inputs[1:]), kwargs
        return inputs, {**kwargs, "hidden_states": streams.repeat(kwargs["hidden_states"], settings.streams)}

    return hook


def _collapse_layer(head: streams.StreamsHead) -> Any:
    return lambda module, inputs, output: (head(output[0]), *output[1:])


def _hand_on_tokens(module: Any, inputs: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Megatron's mask of padding goes where the tokens are wanted, divided as they are; there is no padding here."""
    if kwargs.get("padding_mask") is not None:
        raise ValueError("--n-hash-layers: routers have no mask of padding; call the model without padding_mask")
    tokens = kwargs["input_ids"] if "input_ids" in kwargs else inputs[0]
    return inputs, {**kwargs, "padding_mask": tokens}
