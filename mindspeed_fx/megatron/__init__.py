"""What Megatron-core 0.16 needs to be captured whole, and to run without CUDA.

``import mindspeed_fx.megatron_adaptor`` applies the patches (``table.py``); each has a reason and a place where it
holds (:func:`applied`), and :func:`undo` restores Megatron. Most hold only while torch.compile traces: eager Megatron
stays Megatron. Those for running without CUDA are applied only where torch has none: on a CPU, or an NPU without
transfer_to_npu.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Callable

from mindspeed_fx.compat import dynamo
from mindspeed_fx.megatron import device_words, patches

__all__ = ["applied", "apply", "known_limits", "undo"]

SUPPORTED = "0.16"
_after_undo: list[Callable[[], None]] = []


def apply() -> None:
    """Apply the patches; a second call does nothing.

    Raises:
        ImportError: Megatron-core is missing, or of a version the patches were not written for.
    """
    if patches.applied():
        return
    _check_version()
    from mindspeed_fx.megatron import checkpoint, flags, jit, missing, table, training

    _after_undo.append(missing.answer_for_triton())
    words = device_words.Words(*table.device_words())
    words.install()
    _after_undo.append(words.remove)
    patches.apply(table.table())
    jit.unwrap()
    _after_undo.append(checkpoint.allow_side_effects())
    checkpoint.allow_signals()
    words.when_imported("megatron.training.arguments", flags.patch_parser)
    _after_undo.append(flags.unpatch_parser)
    _after_undo.append(dynamo.capture_sizes())
    _after_undo.append(dynamo.reorder_warnings())
    for module, replacements in training.table().items():
        words.when_imported(module, functools.partial(patches.apply, replacements))


def undo() -> None:
    """Restore Megatron-core as it was before :func:`apply`, also in modules that were imported in between."""
    if patches.applied():
        from mindspeed_fx.megatron import jit

        patches.undo()
        jit.restore()
        while _after_undo:
            _after_undo.pop()()


def applied() -> list[tuple[str, str]]:
    """(target, reason) of every patch in force; the reason ends with where it holds."""
    return [(p.target, f"{p.reason} ({p.where})") for p in patches.applied()]


def known_limits() -> list[str]:
    """What is not captured, or behaves differently, with the adaptor; each one sentence."""
    return list(_LIMITS)


_LIMITS = (
    "MoE with experts on other ranks is one graph whose sizes are symbols; the counts of rows are read on the host "
    "once a layer. Without the adaptor (undo) Dynamo breaks there again.",
    "The dispatcher flex needs DeepEP or HybridEP. MoE with a latent projection or with experts of TransformerEngine "
    "or GroupedMLP is left to Megatron's own code; --moe-grouped-gemm without TransformerEngine is experts in "
    "sequence, whose products are one grouped product in the graph.",
    "With --use-torch-fsdp2 the graph of a chunk gathers weights one by one and divides gradients again, in place of "
    "FSDP2's hooks, which torch keeps from Dynamo: num_to_forward_prefetch is the scheduler's to choose there, and "
    "reshard_after_forward with a size gathers from all ranks; --use-megatron-fsdp needs CUDA.",
    "Overlapped shared experts have no stream of their own in a graph; the compiler orders them.",
    "Deferred embedding weight gradients, and main_grad under Megatron's FSDP, stay with Megatron's autograd.Function, "
    "which writes outside the graph and breaks it. With gradient_accumulation_fusion the flag grad_added_to_main_grad "
    "is not set in a graph; DistributedDataParallel adds a gradient of zeros.",
    "A graph compiled without Megatron's training loop keeps the gathered input of a sequence-parallel linear for "
    "its weight gradient; the loop sets option regather, with which it is gathered again in the backward, as Megatron "
    "does.",
    "Sequence shards of uneven size (output_split_sizes, input_split_sizes) are lengthened to the longest in a graph, "
    "and on a CPU in eager mode too.",
    "Label smoothing with tensor parallelism smooths over the whole vocabulary in a graph, so that the loss does not "
    "depend on the number of ranks; Megatron smooths over each rank's part.",
    "A target outside the vocabulary: -100 gives loss 0 on one rank, any other fails; Megatron gives some finite loss "
    "that its loss mask drops.",
    "A fork of the tracker in a graph acts on dropout and on the noise of routers (`Tensor.exponential_()`, "
    "`Tensor.uniform_()`) alone; torch.rand and the like draw from the default generator there.",
    "Recomputation in a graph is torch's checkpoint, which keeps its inputs whole (distribute_saved_activations has no "
    "effect), and the compiler may still choose to keep more.",
    "With dynamic=True Dynamo makes the floats of the model (epsilon, softmax scale, dropout) inputs of the graph; "
    "leave dynamic unset.",
    "Without CUDA and NPU a model built without model_parallel_cuda_manual_seed draws all dropout from the default "
    "generator; Megatron refuses it.",
    "Context parallelism: packed_seq_params (--sft, --hybrid-context-parallel) and Mamba's layers are refused or not "
    "divided; a ring takes no attention dropout, and heads that are exchanged no softmax offset; every row that a mask "
    "leaves is computed whole, so that masks save no work; without --calculate-per-token-loss the gradient of a batch "
    "whose ranks have unequal numbers of tokens in the loss is the mean of the ranks' means, as Megatron's.",
    "Losses that Megatron logs (of a router, of tokens ahead) are added up in a graph where mindspeed_fx compiles the "
    "chunks of pretrain_gpt.py; with torch.compile called by hand the second forward is another graph.",
    "Packed sequences (packed_seq_params of layout thd, `--sft`) and documents (--reset-attention-mask) are skipped: "
    "their ends, not a mask, reach the graph, and the host waits once for a batch of documents. Scores between them "
    "are computed and masked in rings and gathered keys of context parallelism, with ALiBi, a soft-cap, sinks or "
    "dropout of attention, and of a batch of more than 1,023 documents; a window with packed_seq_params is refused.",
    "Models with Mamba's layers, and of vision models all but LLaVA (pretrain_vlm.py), have not been tried.",
)


def _check_version() -> None:
    wanted = f"mindspeed_fx.megatron_adaptor supports megatron-core {SUPPORTED}.x"
    version = _version()
    if version is None:
        raise ImportError(f"{wanted}, which is not installed; pip install 'mindspeed-fx[megatron]'")
    if not version.startswith(SUPPORTED + "."):
        raise ImportError(f"{wanted}; {version} is installed")


def _version() -> str | None:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:  # a checkout of Megatron-LM on the path
        return importlib.import_module("megatron.core").__version__
    except ImportError:
        return None
