"""What Megatron-LM's training loop (``megatron.training``, ``pretrain_gpt.py``) needs beside Megatron-core's patches:
to start without CUDA, and to compile each chunk of the model.
"""

from mindspeed_fx.megatron.training.table import table

__all__ = ["table"]
