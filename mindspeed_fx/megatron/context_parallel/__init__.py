"""Context parallelism in Megatron's models: the sequence is divided over ranks, and attention sees all of it.

MindSpeed's algorithms (``--context-parallel-algo``) are one scheme with two degrees: ``ulysses`` ranks exchange heads
for parts of the sequence (Jacobs et al. 2023, "DeepSpeed-Ulysses"), and ``ring`` groups of them see each other's keys,
by a ring (Liu et al. 2023, "Ring Attention"; :mod:`mindspeed_fx.sharding.spmd.ring`) or by gathering them. Megatron's
split of the batch stays as it is: rank r of n holds chunks r and 2n-1-r of the sequence, and what ``ulysses``
neighbours hold together, in order, is the same split among the ``ring`` groups.

``settings`` reads the flags and refuses, ``batch`` splits masks, ``sequence`` moves chunks, ``rings`` goes round a
group, ``attention`` is the core attention, ``roll`` shifts tokens for multi-token prediction.
"""

from mindspeed_fx.megatron import missing
from mindspeed_fx.megatron.context_parallel import attention, batch, roll
from mindspeed_fx.megatron.context_parallel.settings import Settings, read_settings
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

__all__ = ["Settings", "read_settings", "table"]


def table() -> list[Patch]:
    """What is replaced in Megatron-core."""
    divided = "attention over a divided sequence, which Megatron leaves to TransformerEngine"
    absent = not missing.has_transformer_engine()
    names = "without TransformerEngine its classes are None, and latent attention asks whether its layers are theirs"
    return [
        *([Patch("transformer.multi_latent_attention:HAVE_TE", False, names, EVERYWHERE)] if absent else []),
        Patch(f"{attention.ATTENTION}.__init__", attention.initialize, divided, EVERYWHERE),
        Patch(f"{attention.ATTENTION}.forward", attention.forward, divided, EVERYWHERE),
        Patch(batch.SPLIT, batch.batch_on_this_rank, "of a mask a rank keeps the rows that it computes", EVERYWHERE),
        Patch(batch.POSITIONS, batch.positions_on_this_rank, "takes its part by an index on CUDA", EVERYWHERE),
        Patch(roll.ROLL, roll.roll_tensor, "sends and receives one by one"),
    ]
