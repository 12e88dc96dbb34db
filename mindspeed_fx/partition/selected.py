"""Values of which a backward looks for elements that were picked out of them: it reads what the forward wrote."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.selected import compared_with_their_own


def keep_sources(joint: fx.GraphModule) -> None:
    """Save such values of a joint graph: made again of what was rounded on the way they are others, of which none need
    be the greatest any more. In a checkpointed region both sides are made again.
    """
    for value in compared_with_their_own(joint.graph):
        if not partitioner.must_recompute(value):
            partitioner.mark_save(value)
