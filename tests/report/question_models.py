"""The two models of docs/questions.md: a Llama of Hugging Face on one device, and one by a plan on four ranks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Sequence

import torch
import torch.distributed as dist

import mindspeed_fx
from tests.sharding.llama import Llama

RANKS = 4
MESH = {"cp": 2, "tp": 2}
PLAN = "ring+tp"


def hf_llama(layers: int = 3, hidden: int = 256, seq: int = 256):
    """A Llama of Hugging Face with its own attention written out, and a batch of two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=seq,
        attn_implementation="eager",
    )
    ids = torch.randint(0, 4096, (2, seq))
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}


@contextlib.contextmanager
def one_of_four(rank: int):
    """This process as one of four ranks whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def report_of_rank(rank: int, layers: int = 2, **arguments):
    """The report of one rank of a Llama by a plan, modelled for Ascend 910B2; without the search for chunks, which
    takes a minute."""
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama(layers=layers, hidden=256, heads=8, kv_heads=4, ffn=512, vocab=512)
    ids = torch.randint(0, 512, (2, 256))
    options = {"codegen": "eager", "hardware": "ascend910b2", "disable": ["overlap.decompose"]}
    with one_of_four(rank):
        mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        model = mindspeed_fx.parallelize(model, mesh, PLAN, check_inputs=False)
        return mindspeed_fx.explain(model, ids, ids, options=options, **arguments)


def save_ranks(directory: str, layers: int = 1, forms: Sequence[str] = (), ranks: Sequence[int] = range(RANKS)) -> None:
    """The dump of four ranks, each in a process of its own; the first also knows other forms of the step."""
    for rank in ranks:
        arguments = [directory, str(rank), str(layers), *(forms if not rank else ())]
        subprocess.run([sys.executable, "-m", __spec__.name, *arguments], check=True)


def save_rank(directory: str, rank: int, layers: int, forms: Sequence[str]) -> None:
    """The dump of one rank."""
    report = report_of_rank(rank, layers, what_if=list(forms) or False)
    with one_of_four(rank):
        report.save(directory)


if __name__ == "__main__":
    save_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
