"""Runs the blocks of one page; as a program, ``python -m tests.docs.run PAGE ...``, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from pathlib import Path

import torch

from mindspeed_fx import passes
from tests.docs.blocks import Block, commands, read_page
from tests.docs.commands import check_command, run_command

OPTIONS = '{"codegen": "eager"}'
"""Of the pages' compilations, where a block does not say otherwise: without generated code a page takes seconds."""


NAME = "page_of_the_documentation"


class BlockError(Exception):
    """A block that failed: where, and how."""


def run_page(page: str, tier: str = "usual", blocks: list[Block] | None = None) -> int:
    """Run what runs of a page in this folder; returns how many blocks did."""
    module = types.ModuleType(NAME)
    namespace = vars(module)
    sys.modules[NAME] = module  # where Dynamo looks for a function's globals
    count, before = 0, {p.name for p in passes.registered()}
    try:
        for block in read_page(page) if blocks is None else blocks:
            try:
                count += _run_block(block, namespace, tier)
            except (Exception, SystemExit) as e:
                tail = "".join(traceback.format_exception(e)[-6:])
                raise BlockError(f"{block.place}: {type(e).__name__}: {e}\n{tail}") from None
    finally:
        del sys.modules[NAME]
        for name in {p.name for p in passes.registered()} - before:
            passes.unregister(name)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return count


def _run_block(block: Block, namespace: dict, tier: str) -> int:
    """1 if the block ran."""
    here = Path.cwd()
    if block.title:
        (here / block.title).write_text(block.code)
        if block.language == "python":
            compile(block.code, block.title, "exec")
    elif block.language == "python":
        # Lines as in the page, where inspect finds them.
        path = Path(__file__).parents[2] / block.page
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        if block.runs_in(tier):
            exec(code, namespace)
            return not block.is_setup
    elif block.language == "bash":
        for line in commands(block):
            if block.runs_in(tier):
                run_command(line, here)
            else:
                check_command(line, here, is_elsewhere="Megatron-LM" in block.reason)
        return block.runs_in(tier)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "yaml":
        import yaml

        yaml.safe_load(block.code)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("MINDSPEED_FX_OPTIONS", OPTIONS)
    for name in sys.argv[1:]:
        torch._dynamo.reset()
        sys.modules.pop("mindspeed_fx.megatron_adaptor", None)  # a page may undo what importing it does
        print(f"{name}: {run_page(name)} blocks")
