"""Flag -> runs of it: the words, and what they do to Megatron's arguments and to the backend's options ("options"),
what their line holds ("says"), or what their error holds ("error").
"""

from tests.megatron.flags.layer_effects import BENCHMARKS, EXPERTS, MODEL, PARTS
from tests.megatron.flags.memory_effects import MEMORY
from tests.megatron.flags.parallel_effects import KERNELS, PARALLEL, SHARED

EFFECTS = {**MODEL, **PARTS, **BENCHMARKS, **EXPERTS, **PARALLEL, **MEMORY, **KERNELS, **SHARED}
