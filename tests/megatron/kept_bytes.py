"""What layers of Megatron's keep for the backward, in bytes, and the closed forms of MindSpeed's memory features.

A layer's bytes are a model's of three layers less those of two: what stands beside the layers, or is for all of them,
is in both.
With T tokens, hidden size H, width F, N heads of width D, of which K have keys and values, and 4 bytes a number:

    recomputed whole            it keeps its input, T H
    activation recomputed       T F less: what the second product reads
    norms recomputed            2 T (H + 1) less: two results and their roots of mean squares
    up-projections recomputed   of latent attention, T N (2 D + V) less: queries and keys of width D, values of width V
    input moved                 T H, recomputed whole or not
    attention moved             T (N D + 2 K D) of the packed projection, T (N D + K D) rotated queries and keys,
                                T (2 N D + N) of results in the two orders that attention and its projection read, and
                                the logarithms of its sums
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from tests.megatron.gpt_models import batch, tiny_gpt, train
from tests.passes.recompute.moved_bytes import MovedBytes

BATCH, SEQ, HIDDEN, WIDTH, HEADS, KV_HEADS = 4, 32, 64, 256, 4, 2
TOKENS = 4 * BATCH * SEQ
"""Bytes of one number a token."""
HEAD = HIDDEN // HEADS
LATENT_HEAD, LATENT_VALUE = 16, 8
"""Widths of tiny_gpt's latent attention."""
GRAPH = {"codegen": "eager", "recompute": "none"}
WHOLE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
UP = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
ENTERING = {"codegen": "eager", "memory_budget": 1.0, "offload": True, "recompute": {"layers.*": "offload_input"}}
MOVED = {"memory_budget": 1.0, "offload": True, "recompute": {"layers.*.self_attention": "offload"}}


def bytes_kept(call: Callable, model: torch.nn.Module, inputs: dict[str, Any]) -> int:
    """What a forward keeps for the backward, parameters aside."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call(**inputs).mean()
    total = sum(storage.nbytes() for address, storage in kept.items() if address not in known)
    loss.backward()
    return total


def _of_model(layers: int, options: dict[str, Any] | None, config: dict[str, Any]) -> tuple[int, int]:
    """(bytes kept, bytes moved to the host) of a model's forward; eager where there are no options."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = dict(hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, ffn=WIDTH, seq=SEQ)
    model, inputs = tiny_gpt(layers=layers, **sizes, **config), batch(BATCH, SEQ)
    call = model
    if options is not None:
        call = torch.compile(model, backend="mindspeed", fullgraph=True, options=options)
        train(model, inputs, call)
    with MovedBytes() as moved:
        return bytes_kept(call, model, inputs), moved.bytes


def of_layer(options: dict[str, Any] | None = None, **config: Any) -> tuple[int, int]:
    """(bytes kept, bytes moved to the host) of one layer."""
    return _of_layer(repr((options, config)), options, config)


_seen: dict[str, tuple[int, int]] = {}


def _of_layer(key: str, options: dict[str, Any] | None, config: dict[str, Any]) -> tuple[int, int]:
    if key not in _seen:
        two, three = (_of_model(layers, options, config) for layers in (2, 3))
        _seen[key] = three[0] - two[0], three[1] - two[1]
    return _seen[key]


def saved(options: dict[str, Any], **config: Any) -> int:
    """Bytes less in a layer's graph than where nothing is made again."""
    plain = {"latent": True} if config.get("latent") else {}
    return of_layer(GRAPH, **plain)[0] - of_layer(GRAPH | options, **config)[0]


ROWS: dict[str, tuple[Callable[[], int], int]] = {
    "layer recomputed, eager": (lambda: of_layer(None, **WHOLE)[0], TOKENS * HIDDEN),
    "layer recomputed, graph": (lambda: of_layer(GRAPH, **WHOLE)[0], TOKENS * HIDDEN),
    "activation recomputed": (lambda: saved({"recompute": "activation_function"}), TOKENS * WIDTH),
    "norms recomputed": (lambda: saved({"recompute": "norm"}), TOKENS * 2 * (HIDDEN + 1)),
    "latent up-projections recomputed": (
        lambda: saved({}, latent=True, **UP),
        TOKENS * HEADS * (2 * LATENT_HEAD + LATENT_VALUE),
    ),
    "input moved": (lambda: of_layer(ENTERING)[1], TOKENS * HIDDEN),
    "input moved, recomputed": (lambda: of_layer(ENTERING, **WHOLE)[1], TOKENS * HIDDEN),
    "attention moved": (
        lambda: of_layer({"codegen": "eager", **MOVED})[1],
        TOKENS * (5 * HEADS * HEAD - HEADS * HEAD + 3 * KV_HEADS * HEAD + HEADS),
    ),
}
"""What is counted -> how, and its closed form; bytes."""
