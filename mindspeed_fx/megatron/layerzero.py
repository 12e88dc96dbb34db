"""``--layerzero``: weights that are gathered layer by layer, by torch's FSDP2 with the settings of MindSpeed's file.

    zero3_size: 8
    transformer_layers: [megatron.core.transformer.transformer_layer.TransformerLayer]
    param_dtype: bf16
    reduce_dtype: fp32

MindSpeed gathers weights from ``zero3_size`` ranks and divides states of the optimizer over all data-parallel ranks;
FSDP2 divides both over those ranks, so that states take as much more memory as there are copies of the weights.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron.fsdp2_config import Settings, check, read_settings, refuse_unknown

FLAG = "--layerzero-config"
OURS = {
    "zero3_size": ("sharding_size", 8),
    "transformer_layers": ("sub_modules_to_wrap", None),
    "param_dtype": ("param_dtype", "fp16"),
    "reduce_dtype": ("reduce_dtype", "fp16"),
    "autocast_input": ("cast_forward_inputs", True),
}
"""MindSpeed's setting -> FSDP2's, and MindSpeed's default."""
SPEED = ("backward_prefetch", "backward_reduce_scatter", "forward_prefetch", "limit_all_gathers", "autocast_output")
"""Settings that change no value here: FSDP2 gathers one layer ahead, and losses are made in float32."""
REFUSED = {
    "ignored_modules": "every weight is divided: leave it out",
    "offload_grads": "gradients stay on the device: leave it out",
    "ckpt_load_path": "give --load, with a checkpoint of --ckpt-format torch_dist",
    "param_init_fn": "Megatron makes the first weights: leave it out",
    "buffer_dtype": "buffers keep their type: leave it out",
}


def read(path: str) -> Settings:
    """What FSDP2 is told, by a file of LayerZeRO's settings.

    Raises:
        OptionError: the file cannot be read, or has a setting or value that is not known, or not done here.
    """
    place, known = f"{FLAG} {path}", [*OURS, *SPEED, *REFUSED]
    values = read_settings(place, path, known, "zero3_size: 8")
    for name, value in values.items():
        refuse_unknown(place, name, known)
        if name in REFUSED and value:
            raise OptionError(f"{place}: {name} is {value!r}: {REFUSED[name]}")
    ours: dict[str, Any] = {}
    for name, (setting, default) in OURS.items():
        value = default if values.get(name) is None else values[name]
        check(f"{place}: {name}", setting, value)
        ours[setting] = tuple(value) if isinstance(value, list) else value
    return Settings(num_to_forward_prefetch=1, **ours)
