"""``python -m mindspeed_fx.megatron.flags``: prints docs/mindspeed_flags.md."""

from mindspeed_fx.megatron.flags.page import page

print(page(), end="")
