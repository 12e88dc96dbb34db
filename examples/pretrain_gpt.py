"""Pretrain a GPT on text by Megatron-core's own parts, compiled by the mindspeed backend; without Megatron-LM.

  python examples/pretrain_gpt.py                       # 13 M parameters, Python's own source: minutes on two cores
  python examples/pretrain_gpt.py --load runs/gpt       # go on from the last checkpoint, bitwise as if never stopped
  python examples/pretrain_gpt.py --data book.txt --backend inductor
  python examples/pretrain_gpt.py --memory-budget 2GiB --check each        # options of the backend: docs/options.md
  torchrun --nproc_per_node 4 examples/pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel
  torchrun --nproc_per_node 2 examples/pretrain_gpt.py --num-experts 8 --expert-model-parallel-size 2

The device is the machine's: CUDA, an NPU (torch_npu), else the CPU, where processes talk over gloo.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings


def main() -> None:
    """Imports come here: Megatron's writers of checkpoints are processes that import this file once more."""
    warnings.filterwarnings("ignore")  # Megatron-core warns of every optional package
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if importlib.util.find_spec("torch_npu"):
        import torch_npu  # noqa: F401
        from torch_npu.contrib import transfer_to_npu  # noqa: F401  an NPU answers torch.cuda
    import mindspeed_fx.megatron_adaptor  # noqa: F401  isort: skip  before Megatron-core

    import gpt_arguments
    import gpt_model
    import gpt_trainer
    import torch.distributed as dist

    args = gpt_arguments.parse(__doc__)
    device = gpt_model.start_processes(args)
    try:
        gpt_trainer.Trainer(args, gpt_trainer.open_corpus(args)).run(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
