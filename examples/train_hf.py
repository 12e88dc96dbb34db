"""Train a model of Hugging Face transformers, on one device or under a plan of mindspeed_fx.

  python examples/train_hf.py                                          # a small Qwen3 on Python's own source
  python examples/train_hf.py --model t5 --layers 2 --hidden 256       # causal, masked, seq2seq and vision models
  python examples/train_hf.py --config config.json --data book.txt --dtype bfloat16
  torchrun --nproc-per-node 4 examples/train_hf.py --model qwen3 --devices auto           # the plan is searched
  torchrun --nproc-per-node 4 examples/train_hf.py --plan zero2+tp_sp --mesh dp=2,tp=2    # or named
  torchrun --nproc-per-node 4 examples/train_hf.py --plan pp2+zero2 --schedule ZBVZeroBubble:2   # stages of a pipeline
  torchrun --nproc-per-node 4 --max-restarts 3 examples/train_hf.py    # goes on by itself when a process dies

The same command goes on from the last checkpoint under --save: bitwise on the same mesh and plan, to rounding on
another. The device is the machine's: CUDA, an NPU (torch_npu), else the CPU, where processes talk over gloo.
"""

from __future__ import annotations

import logging
import os
import warnings


def main() -> None:
    import hf_arguments

    args = hf_arguments.parse(__doc__)  # before what takes seconds to import
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if args.rank:
        logging.getLogger("mindspeed_fx").setLevel(logging.ERROR)
    import hf_trainer
    import torch.distributed as dist

    try:
        hf_trainer.Trainer(args).train()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
