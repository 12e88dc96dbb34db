"""HCCL's options of Megatron's groups, with a stand-in for torch_npu: traced, not run."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mindspeed_fx.megatron.flags import group_options

LARGE = Namespace(
    seq_length=8192,
    micro_batch_size=1,
    hidden_size=4096,
    tensor_model_parallel_size=4,
    context_parallel_size=2,
    expert_model_parallel_size=2,
    num_attention_heads=32,
    num_query_groups=8,
    moe_router_topk=6,
    moe_token_dispatcher_type="alltoall",
    sequence_parallel=True,
    hccl_group_buffer_adaptive=True,
    hccl_ep_group_buffer_adaptive_factor=2.0,
)
ELEMENTS = 16
"""2^20 elements of a rank's part of the sequence: 8192 / 2 tokens of 4096."""


def sizes(**more):
    config = group_options.configurations(Namespace(**{**vars(LARGE), **more}))
    return {name: values["hccl_buffer_size"] for name, values in config.items()}


def test_sizes_by_the_largest_message():
    """Two bytes an element, in MiB."""
    plain = sizes()
    assert plain["tp"] == 2 * ELEMENTS and plain["pp"] == 2 * ELEMENTS // 4
    assert plain["ep"] == 2 * ELEMENTS // 4 * 6 * 2 and plain["cp"] == 2 * ELEMENTS // 4
    assert sizes(sequence_parallel=False)["tp"] == 4 * ELEMENTS
    assert sizes(sequence_parallel=False)["pp"] == 2 * ELEMENTS
    assert sizes(hccl_ep_group_buffer_adaptive_factor=-1.0)["ep"] == 200
    assert sizes(moe_token_dispatcher_type="allgather")["ep_tp"] == 2 * ELEMENTS * 2 * 2
    assert sizes(context_parallel_algo="megatron_cp_algo")["cp"] == 2 * (2 * ELEMENTS * 8 // 32 // 4)
    assert sizes(hccl_group_buffer="tp:300")["tp"] == 300


@pytest.mark.parametrize("backend", ["hccl", "gloo"])
def test_options_of_a_group(backend, monkeypatch):
    pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
    import mindspeed_fx.megatron

    api = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=api)))
    flags = Namespace(hccl_op_mode="cp:2;exp:4", hccl_group_buffer="exp:300")
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=flags))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    mindspeed_fx.megatron.apply()
    try:
        from megatron.core import parallel_state

        options = {name: parallel_state.get_nccl_options(name, {}) for name in ("cp", "ep", "tp")}
    finally:
        mindspeed_fx.megatron.undo()
    configs = {name: one and one.hccl_config for name, one in options.items()}
    expected = {"cp": {"hccl_op_expansion_mode": 2}, "ep": {"hccl_buffer_size": 300, "hccl_op_expansion_mode": 4}}
    assert configs == ({"tp": None, **expected} if backend == "hccl" else dict.fromkeys(configs))
