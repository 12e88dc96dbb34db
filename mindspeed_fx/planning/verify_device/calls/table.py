"""What a call is."""

from __future__ import annotations

from typing import Any

Call = tuple[str, Any, tuple[Any, ...], str]
"""Name, ``torch.ops.mindspeed`` operator, its arguments on the processor, and the kernel that is to take it on npu; ""
where npu has none."""
