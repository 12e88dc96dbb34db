"""``--unaligned-linear``: tensor-parallel ranks that share heads, widths and tokens unevenly.

n units over p ranks: each has n // p, the first n mod p one more. A unit is a query group with its heads (attention's
linears), one channel (the MLP; gate and up together) or one token (sequence parallelism). MindSpeed divides so
(docs/zh/features/unaligned_linear.md of its repository). Without the flag nothing is changed.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.groups import group_or_default, size
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

DIVIDE = "utils:divide"
CPU_WEIGHT = "tensor_parallel.layers:_initialize_affine_weight_cpu"
COLUMN, ROW = (
    "tensor_parallel.layers:ColumnParallelLinear.__init__",
    "tensor_parallel.layers:RowParallelLinear.__init__",
)
ATTENTION = "transformer.attention:Attention.__init__"
CONFIG = "transformer.transformer_config:TransformerConfig.__post_init__"
ROTARY_LENGTH = "models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len"

OPTIONS = {"disable": ["overlap.decompose", "overlap.bucket", "overlap.schedule"]}
"""Of the backend, where ranks hold unequal parts: their collectives stay in the program's order. What these passes
choose follows from sizes, and ranks of other sizes would choose another order.
"""

_sequence: int | None = None
"""Tokens of a sequence on all ranks together; None where ranks share everything evenly."""


def allow(sequence: int) -> None:
    """Let ranks share unevenly what they cannot share evenly, in models that are built from now on.

    Args:
        sequence: tokens of a sequence, on all tensor-parallel ranks together.
    """
    global _sequence
    _sequence = sequence


def forbid() -> None:
    """Undo :func:`allow`."""
    global _sequence
    _sequence = None


def parts(units: int, ranks: int) -> list[int]:
    """Units of each rank: 5 on 2 are [3, 2].

    Args:
        units: to be shared.
        ranks: that share them.
    """
    fewest, more = divmod(units, ranks)
    return [fewest + (rank < more) for rank in range(ranks)]


def sequence_parts(ranks: int) -> list[int] | None:
    """Tokens of each rank in sequence parallelism; None where they are as many on each."""
    return parts(_sequence, ranks) if _sequence is not None and _sequence % ranks else None


def is_sequence_uneven(*args: Any, **kwargs: Any) -> bool:
    """Whether the tensor-parallel ranks hold unequal parts of a sequence, whatever is asked of them."""
    return _sequence is not None and sequence_parts(size(group_or_default())) is not None


# --------------------------------------------------------------------------- sizes, where a model is built


@dataclass(frozen=True)
class _Share:
    """What ``divide`` and a weight's start need to know: sizes in units, and whose part is wanted.

    Args:
        units: size -> channels of one unit of it.
        rank, ranks: of the tensor-parallel group.
    """

    units: dict[int, int]
    rank: int
    ranks: int

    def parts(self, whole: int) -> list[int]:
        unit = self.units[whole]
        return [unit * part for part in parts(whole // unit, self.ranks)]


_share: ContextVar[_Share | None] = ContextVar("share", default=None)


@contextlib.contextmanager
def _sharing(units: dict[int, int], group: Any) -> Iterator[None]:
    """Sizes among ``units`` are shared by units while the context lasts; the others evenly."""
    group = group_or_default(group)
    is_shared = _sequence is not None and size(group) > 1
    token = _share.set(_Share(units, group.rank(), group.size()) if is_shared else None)
    try:
        yield
    finally:
        _share.reset(token)


def divide(numerator: int, denominator: int) -> int:
    """``megatron.core.utils.divide``, or this rank's part where units are shared unevenly."""
    share = _share.get()
    if share is not None and denominator == share.ranks and numerator in share.units:
        return share.parts(numerator)[share.rank]
    return patches.original(DIVIDE)(numerator, denominator)


def attention_init(self: Any, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
    """``Attention.__init__`` with a rank's own number of groups and heads."""
    heads, groups = config.num_attention_heads, config.num_query_groups
    group = group_or_default(None if pg_collection is None else pg_collection.tp)
    units: dict[int, int] = {}
    if groups >= size(group):
        ratio = heads // groups
        units = {groups: 1, heads: ratio, heads * config.kv_channels: ratio * config.kv_channels}
    with _sharing(units, group):
        patches.original(ATTENTION)(self, config, *args, pg_collection=pg_collection, **kwargs)


def linear_init(target: str) -> Callable[..., None]:
    """The constructor of a column- or row-parallel linear whose parts may differ.

    Args:
        target: ``COLUMN`` or ``ROW``.
    """

    def init(
        self: Any,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        stride: int = 1,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        **kwargs: Any,
    ) -> None:
        whole = output_size if target == COLUMN else input_size
        units = {} if is_expert else {whole: _unit(config, whole, stride, tp_comm_buffer_name, tp_group)}
        with _sharing({w: unit for w, unit in units.items() if unit}, tp_group):
            kwargs |= dict(config=config, stride=stride, is_expert=is_expert)
            kwargs |= dict(tp_comm_buffer_name=tp_comm_buffer_name, tp_group=tp_group)
            patches.original(target)(self, input_size, output_size, **kwargs)

    return init


def _unit(config: Any, whole: int, stride: int, name: str | None, group: Any) -> int:
    """Channels that stay together: those of a query group, or a gate and its up; 0 where Megatron divides."""
    if name not in ("qkv", "proj"):
        return stride
    groups = config.num_query_groups
    return whole // groups if groups >= size(group_or_default(group)) else 0


def initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[Tensor], Any],
    stride: int = 1,
    return_master_weight: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """``_initialize_affine_weight_cpu``: this rank's part of the whole weight that every rank draws, also uneven."""
    share, whole = _share.get(), (output_size, input_size)[partition_dim]
    if share is None or whole not in share.units:
        return patches.original(CPU_WEIGHT)(
            weight, output_size, input_size, per_partition_size, partition_dim, init_method, stride,
            return_master_weight, **kwargs,
        )  # fmt: skip
    if not kwargs.get("skip_set_tensor_parallel_attributes"):
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)
    master = torch.empty(output_size, input_size, dtype=torch.float32)
    init_method(master)
    master = master.to(kwargs.get("params_dtype", torch.float32))
    with torch.no_grad():
        weight.copy_(own_part(master, partition_dim, stride, share))
    return master if return_master_weight else None


def own_part(whole: Tensor, dim: int, stride: int, share: _Share) -> Tensor:
    """A rank's part of a weight: of each of ``stride`` blocks along ``dim`` the rank's channels."""
    sizes = [n // stride for n in share.parts(whole.shape[dim])]
    return torch.cat([block.split(sizes, dim)[share.rank] for block in whole.chunk(stride, dim)], dim)


def config_post_init(self: Any) -> None:
    """``TransformerConfig.__post_init__``, which refuses heads and groups that ranks do not share evenly.

    It reads them for that alone, once the width of a head is known, so that it is shown the next larger numbers.
    """
    ranks, heads, groups = self.tensor_model_parallel_size, self.num_attention_heads, self.num_query_groups
    if _sequence is None or (heads % ranks == 0 and (groups or heads) % ranks == 0):
        patches.original(CONFIG)(self)
        _let_lengths_vary(self)
        return
    groups = groups or heads
    if groups < ranks:
        raise ValueError(
            f"--unaligned-linear: {groups} query groups are fewer than {ranks} tensor-parallel ranks, and a rank would "
            "have none; give a --tensor-model-parallel-size that is not larger"
        )
    self.kv_channels = self.kv_channels or self.hidden_size // heads
    self.num_attention_heads, self.num_query_groups = (-(-n // ranks) * ranks for n in (heads, groups))
    patches.original(CONFIG)(self)
    self.num_attention_heads, self.num_query_groups = heads, groups
    _let_lengths_vary(self)


def _let_lengths_vary(config: Any) -> None:
    """Stages tell each other how many tokens they send; else each reckons with as many as it holds itself."""
    ranks, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if config.sequence_parallel and stages > 1 and sequence_parts(ranks) is not None:
        config.variable_seq_lengths = True


def get_rotary_seq_len(
    self: Any,
    inference_context: Any,
    transformer: Any,
    transformer_input: Tensor,
    transformer_config: Any,
    *args: Any,
    **kwargs: Any,
) -> int:
    """``RotaryEmbedding.get_rotary_seq_len``: the whole sequence, which is not a multiple of a rank's part."""
    if transformer_config.sequence_parallel and _sequence is not None and is_sequence_uneven():
        return _sequence
    return patches.original(ROTARY_LENGTH)(
        self, inference_context, transformer, transformer_input, transformer_config, *args, **kwargs
    )


def table() -> list[Patch]:
    """The patches; each does what Megatron does until :func:`allow` is called."""
    heads = "Megatron divides heads, groups and widths evenly; --unaligned-linear does not"
    return [
        Patch(DIVIDE, divide, heads, EVERYWHERE),
        Patch(ATTENTION, attention_init, heads, EVERYWHERE),
        *(Patch(target, linear_init(target), heads, EVERYWHERE) for target in (COLUMN, ROW)),
        Patch(CPU_WEIGHT, initialize_affine_weight_cpu, heads, EVERYWHERE),
        Patch(CONFIG, config_post_init, "refuses heads that ranks share unevenly", EVERYWHERE),
        Patch(ROTARY_LENGTH, get_rotary_seq_len, "ranks may hold unequal parts of a sequence", EVERYWHERE),
    ]
