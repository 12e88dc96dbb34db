"""Parts of a dimension in which tensors of several sizes are packed, as a placement of DTensor's.

torch has strided shards: a rank's part of every one of so many equal pieces. Pieces of different sizes (queries, keys
and values of grouped heads in one weight) have a strided shard whose factor stands for their sizes (:func:`packed`); it
is computed from them, so that all ranks of all jobs mean the same. What torch computes of a strided shard it computes
of ``_split_tensor``, which is told of them here: initialization, ``full_tensor``, redistribution, optimizers. A
checkpoint of torch (2.13) takes any strided shard for one run of elements from its first on; here it has one chunk for
each run (:func:`runs`), so that it loads on any mesh and under any plan.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mindspeed_fx.compat import strided_shards

CODES = 1 << 40
"""Factors from here on stand for sizes; no dimension has so many pieces."""
_SIZES: dict[int, tuple[int, ...]] = {}


def packed(dim: int, sizes: Sequence[int]) -> Placement:
    """A rank's part of each of the pieces, of these sizes, that dimension ``dim`` consists of."""
    sizes = tuple(sizes)
    if len(sizes) == 1:
        return Shard(dim)
    _teach()
    if len(set(sizes)) == 1:
        return _StridedShard(dim, split_factor=len(sizes))
    code = CODES + zlib.crc32(repr(sizes).encode())
    if _SIZES.setdefault(code, sizes) != sizes:
        raise RuntimeError(f"pieces of {sizes} and {_SIZES[code]} elements have one code; change a size by padding")
    return _StridedShard(dim, split_factor=code)


def pieces_of(placement: Placement, size: int) -> tuple[int, ...]:
    """The pieces of which a rank has parts, of a dimension of ``size`` elements; empty: of the whole as one."""
    if not isinstance(placement, _StridedShard):
        return ()
    factor = placement.split_factor
    return _SIZES[factor] if factor >= CODES else (size // factor,) * factor


def runs(x: DTensor) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """(first element in the whole, first element in the part, sizes) of every run of elements that this rank's part
    consists of; nothing is yielded unless one mesh dimension alone divides the dimension of a strided shard."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as shape_and_offset

    mesh, placements = x.device_mesh, x.placements
    strided = [i for i, p in enumerate(placements) if isinstance(p, _StridedShard)]
    if len(strided) != 1 or mesh.get_coordinate() is None:
        return
    (at,) = strided
    dim, n, rank = placements[at].dim, mesh.size(at), mesh.get_coordinate()[at]
    sizes = pieces_of(placements[at], x.shape[dim])
    shared = any(i != at and isinstance(p, Shard) and p.dim == dim for i, p in enumerate(placements))
    if shared or sum(sizes) != x.shape[dim] or any(s % n for s in sizes):
        return
    local, offset = shape_and_offset(x.shape, mesh, placements)
    whole = inner = 0
    for size in sizes:
        first, start, extent = list(offset), [0] * x.ndim, list(local)
        first[dim], start[dim], extent[dim] = whole + rank * (size // n), inner, size // n
        yield first, start, extent
        whole, inner = whole + size, inner + size // n


@functools.cache
def _teach() -> None:
    own = _StridedShard._split_tensor
    strided_shards.count_strided_shards_for_real()  # Dynamo sees full_tensor on fake values

    @functools.wraps(own)
    def split(self: Any, tensor: torch.Tensor, num_chunks: int, **kwargs: Any) -> tuple[list[torch.Tensor], list[int]]:
        if self.split_factor < CODES:
            return own(self, tensor, num_chunks, **kwargs)
        sizes = _SIZES[self.split_factor]
        if any(s % num_chunks for s in sizes) or tensor.shape[self.dim] != sum(sizes):
            raise RuntimeError(f"{num_chunks} ranks cannot share pieces of {sizes} of {tuple(tensor.shape)} evenly")
        pieces = [piece.chunk(num_chunks, self.dim) for piece in tensor.split(sizes, self.dim)]
        parts = [torch.cat([piece[i] for piece in pieces], self.dim) for i in range(num_chunks)]
        return parts, [0] * num_chunks if kwargs.get("with_padding", True) else []

    _StridedShard._split_tensor = split
    _teach_checkpoints()


def _teach_checkpoints() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    write, chunks, part = DTensor.__create_write_items__, DTensor.__create_chunk_list__, DTensor.__get_tensor_shard__

    def chunk_list(self: DTensor) -> list[Any]:
        pieces = [ChunkStorageMetadata(torch.Size(first), torch.Size(extent)) for first, _, extent in runs(self)]
        return pieces or chunks(self)

    def write_items(self: DTensor, fqn: str, value: Any) -> list[Any]:
        pieces = [ChunkStorageMetadata(torch.Size(first), torch.Size(extent)) for first, _, extent in runs(self)]
        properties = TensorProperties.create_from_tensor(self.to_local()) if pieces else None
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in pieces
        ] or write(self, fqn, value)

    def tensor_part(self: DTensor, index: Any) -> torch.Tensor:
        for first, start, extent in runs(self):
            if index.offset is not None and list(index.offset) == first:
                local = self.to_local()
                for d, (s, n) in enumerate(zip(start, extent)):
                    local = local.narrow(d, s, n)
                return local
        return part(self, index)

    DTensor.__create_chunk_list__ = chunk_list  # type: ignore[method-assign]
    DTensor.__create_write_items__ = write_items  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = tensor_part  # type: ignore[method-assign]
