"""Fields of Megatron-core's configuration that are functions: made where the configuration is made.

Megatron writes its arguments into every checkpoint and reads them back as plain values alone (``weights_only``), so
that no argument may be a function: a flag leaves a number or a word, and the configuration gets the function.
"""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from typing import Any, Iterator


def config_fields(args: Namespace) -> dict[str, Any]:
    """Fields that flags ask for: how output projections start, and the gate of the MLP.

    ``mindspeed_init_layers``: std = init_method_std / sqrt(2 layers), as megatron.core.utils.scaled_init_method_normal
    has it for a model of that many layers. ``mindspeed_gate``: "none" or "tanh", the formula of GELU.
    """
    import torch

    fields: dict[str, Any] = {}
    layers, gate = getattr(args, "mindspeed_init_layers", None), getattr(args, "mindspeed_gate", None)
    if layers is not None and not getattr(args, "init_method_xavier_uniform", False):
        std = args.init_method_std / (2.0 * layers) ** 0.5
        fields["output_layer_init_method"] = functools.partial(torch.nn.init.normal_, mean=0.0, std=std)
    if gate is not None:
        gelu = torch.nn.functional.gelu
        fields["gated_linear_unit"] = True
        fields["activation_func"] = gelu if gate == "none" else functools.partial(gelu, approximate=gate)
    return fields


@contextlib.contextmanager
def with_config_fields(args: Namespace) -> Iterator[None]:
    """The fields as arguments, from which Megatron takes each that has a field's name; gone afterwards."""
    fields = config_fields(args)
    vars(args).update(fields)
    try:
        yield
    finally:
        for name in fields:
            delattr(args, name)
