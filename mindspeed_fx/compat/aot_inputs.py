"""Part of :mod:`mindspeed_fx.compat`: inputs that AOTAutograd did not trace with, told to it before it makes what calls
the compiled graphs.

AOTAutograd (2.11 to 2.14) keeps what it knows of each input in one record, ``fw_metadata``, from which everything that
runs later is made, and the traced inputs in one list.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Sequence


def why_fixed() -> str | None:
    """Why the graph that is compiled cannot be given further inputs; None where it can."""
    metadata = _metadata()
    if metadata is None:
        return "AOTAutograd's record of the inputs is not at hand"
    if any(i.mutates_data or i.mutates_metadata for i in metadata.input_info):
        return "inputs are written"
    if metadata.tokens or metadata.is_rng_op_functionalized:
        return "the graph has inputs for side effects or random states"
    if any(not _is_plain(x) for x in metadata.subclass_inp_meta):
        return "inputs are tensors of other classes"
    return None


def give_inputs(like: Sequence[int], kept: Sequence[int]) -> None:
    """The compiled graphs take other inputs from now on.

    Args:
        like: of each of them the traced input that it is treated as.
        kept: of each traced input its position among them.
    """
    metadata = _metadata()
    static = set(metadata.static_input_indices)
    new = dataclasses.replace(
        metadata,
        input_info=[metadata.input_info[i] for i in like],
        output_info=[_output(info, kept) for info in metadata.output_info],
        subclass_inp_meta=_subclass_inputs(metadata.subclass_inp_meta, len(like)),
        static_input_indices=[k for k, i in enumerate(like) if i in static],
    )
    new.__dict__.update({k: v for k, v in metadata.__dict__.items() if k not in new.__dict__})
    metadata.__dict__.update(new.__dict__)


def static_inputs() -> list[int]:
    """Positions of the inputs that lie where they lay in every call."""
    return list(_metadata().static_input_indices)


def written_inputs() -> list[int]:
    """Positions of the plain inputs whose values a forward changes, in its graph or after it."""
    metadata = _metadata()
    if metadata is None or any(not _is_plain(x) for x in metadata.subclass_inp_meta):
        return []
    first = len(metadata.tokens)
    return [first + i for i, info in enumerate(metadata.input_info) if info.mutates_data]


def _metadata() -> Any:
    """The record of the graph that is being cut or, without gradients, compiled: no context has it before that, but the
    functions that call the partitioner do."""
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

    frame = inspect.currentframe()
    while frame is not None:
        record = frame.f_locals.get("fw_metadata")
        if isinstance(record, ViewAndMutationMeta):
            return record
        frame = frame.f_back
    return None


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, int) or type(entry).__name__ == "PlainTensorMeta"


def _subclass_inputs(entries: Sequence[Any], count: int) -> list[Any]:
    if not entries or isinstance(entries[0], int):
        return list(range(count))
    return [dataclasses.replace(entries[0], unwrapped_idx=i) for i in range(count)]


def _output(info: Any, kept: Sequence[int]) -> Any:
    """``base_idx`` is a position among the inputs for outputs that alias one."""
    if info.output_type.name not in ("alias_of_input", "is_input"):
        return info
    return dataclasses.replace(info, base_idx=kept[info.base_idx])


def renumber(description: Any, position: int) -> Any:
    """What torch says of an input, or of an input's gradient, for the input at ``position``."""
    if dataclasses.is_dataclass(description):
        names = {f.name for f in dataclasses.fields(description)}
        if "idx" in names:
            return dataclasses.replace(description, idx=position)  # type: ignore[type-var]
        if "grad_of" in names:
            return dataclasses.replace(description, grad_of=renumber(description.grad_of, position))  # type: ignore[type-var]
    return description
