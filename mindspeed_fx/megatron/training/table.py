"""Every change to ``megatron.training``, by the module it is made in; each is made when the module is imported."""

from __future__ import annotations

from mindspeed_fx.megatron import averages, cuda_calls, model_parts
from mindspeed_fx.megatron.dualpipev import placement
from mindspeed_fx.megatron.groups import kind
from mindspeed_fx.megatron.patches import EVERYWHERE, WITHOUT_CUDA, Patch
from mindspeed_fx.megatron.training import (
    compile_chunks,
    document_ends,
    fixed_documents,
    forward_hooks,
    habits,
    initialize,
    loaded_steps,
    meta_weights,
    optimizer_memory,
    tools,
)

INITIALIZE = "megatron.training.initialize"
ARGUMENTS = "megatron.training.arguments"
YAML = "megatron.training.yaml_arguments"
UTILS = "megatron.training.utils"
HABIT = "asks for TransformerEngine, Apex and CUDA extensions by default"
TRAINING = "megatron.training.training"
CHECKPOINTING = "megatron.training.checkpointing"
AVERAGED = "--optimizer-selection fused_ema_adamw saves the averaged model too"
FUSED_KERNELS = "megatron.legacy.fused_kernels"


def table() -> dict[str, list[Patch]]:
    """The patches for this machine: module -> what is replaced in it."""
    patches = {
        INITIALIZE: [
            Patch(
                "datasets.utils:compile_helpers",
                initialize.compile_helpers,
                "a wheel has the extension and no makefile",
                EVERYWHERE,
            )
        ],
        CHECKPOINTING: [
            Patch(averages.SAVE, averages.save_checkpoint, AVERAGED, EVERYWHERE),
            Patch(averages.GENERATE, averages.generate_state_dict, AVERAGED, EVERYWHERE),
            *loaded_steps.table(),
        ],
        ARGUMENTS: [Patch(habits.ARGUMENTS, habits.validate_args, HABIT, EVERYWHERE)],
        YAML: [
            Patch(habits.YAML, habits.validate_yaml, HABIT, EVERYWHERE),
            Patch(habits.CONFIG_FIELDS, habits.core_config_from_args, "no file has all that it asks for", EVERYWHERE),
        ],
        TRAINING: [
            Patch(
                f"{TRAINING}:get_model",
                compile_chunks.get_model,
                "each chunk of the model is compiled; MINDSPEED_FX_COMPILE=0 leaves it",
                EVERYWHERE,
            ),
            Patch(
                optimizer_memory.TARGET,
                optimizer_memory.get_megatron_optimizer,
                "--reuse-fp32-param and --swap-optimizer are about what the optimizer keeps, and where",
                EVERYWHERE,
                copies=False,
            ),
            Patch(
                model_parts.TARGET,
                model_parts.gpt_model_init,
                "MindSpeed-LLM's models have scales, soft-caps and norms that Megatron-core's have not",
                EVERYWHERE,
            ),
            Patch(
                fixed_documents.TARGET,
                fixed_documents.masks_and_position_ids,
                "--fix-sub-seq-length has documents of one length",
                EVERYWHERE,
            ),
            Patch(placement.ITERATORS, placement.data_iterators, "the second chunk's data are mirrored", EVERYWHERE),
            *meta_weights.table(),
            Patch(tools.TRAIN, tools.train, "MindSpeed's tools begin and end with it", EVERYWHERE),
            Patch(tools.STEP, tools.train_step, "MindSpeed's tools count its iterations", EVERYWHERE),
            *forward_hooks.table(),
        ],
        UTILS: [
            Patch(
                document_ends.TARGET,
                document_ends.batch_on_this_rank,
                "attention skips what documents do not see",
                EVERYWHERE,
            )
        ],
    }
    if kind() != "cuda":
        asks = "asks for the architecture of a CUDA device"
        architecture = habits.device_architecture
        patches[UTILS] += [Patch(f"{UTILS}:get_device_arch_version", architecture, asks, WITHOUT_CUDA)]
        patches[INITIALIZE] += _initialize_without_cuda()
        patches[FUSED_KERNELS] = [
            Patch(
                f"{FUSED_KERNELS}:load", cuda_calls.do_nothing, "compiles CUDA kernels that are not used", WITHOUT_CUDA
            )
        ]
    return patches


def _initialize_without_cuda() -> list[Patch]:
    counts = "decides by the number of CUDA devices whether there is anything to set up"
    return [
        Patch(
            f"{INITIALIZE}:initialize_megatron",
            initialize.initialize_megatron,
            "asserts that there is CUDA",
            WITHOUT_CUDA,
        ),
        Patch(f"{INITIALIZE}:_initialize_distributed", initialize.initialize_distributed, counts, WITHOUT_CUDA),
        Patch(f"{INITIALIZE}:_set_random_seed", initialize.set_random_seed, counts, WITHOUT_CUDA),
    ]
