"""Megatron-core's GPT and mixture of experts compiled for an NPU: nothing left unlowered, run through emulated
operators as Megatron trains, and cross-compiled on fake NPU tensors."""

import json

import pytest
import torch

from tests.ascend.npu_process import needs_npu
from tests.kernels.npu import npu_graphs
from tests.megatron.gpt_models import COUNTS, Loss, batch

KINDS = {"gpt": {}, "moe": {"experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}}


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("moe", torch.float32),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind, dtype in (("gpt", torch.float32), ("gpt", torch.bfloat16), ("moe", torch.bfloat16))
        ),
    ],
)
def test_lowered_graphs_train_as_megatron_does(kind, dtype):
    torch.manual_seed(1)
    inputs = batch()
    graphs = npu_graphs.trains_alike(
        Loss(hidden=64, ffn=48, layers=1, **KINDS[kind]), inputs["input_ids"], inputs["labels"], dtype=dtype
    )
    assert graphs.unlowered() == []
    assert graphs.npu("forward") == {
        "npu_rms_norm": 1,
        "npu_add_rms_norm": 2,
        "npu_fusion_attention_v3": 1,
        "npu_cross_entropy_loss": 1,
    } | (
        {
            "npu_swiglu": 1,
            "npu_grouped_matmul": 2,
            "npu_moe_gating_top_k_softmax_v2": 1,
            "npu_moe_token_permute_with_routing_map": 1,
            "npu_moe_token_unpermute": 1,
        }
        if kind == "moe"
        else {}
    )
    assert graphs.triton("forward")["rope_pair_triton"] == graphs.triton("backward")["rope_pair_triton"] == 1
    backward = graphs.npu("backward")
    assert backward["npu_fusion_attention_grad_v3"] == 1
    assert kind == "gpt" or (
        backward["npu_moe_token_permute_with_routing_map_grad"],
        backward["npu_moe_token_unpermute_grad_v2"],
    ) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [7, 0, 0], [1, 2, 2]])
def test_products_of_experts(counts, dtype):
    """Rows without an expert are zero, and an expert without rows has a gradient of zero."""
    from mindspeed_fx.megatron import experts_npu

    x, grad, counts = torch.randn(7, 5, dtype=dtype), torch.randn(7, 4, dtype=dtype), torch.tensor(counts)
    weights = [torch.randn(4, 5, dtype=dtype) for _ in range(3)]
    for operator, args in (
        (experts_npu.grouped_linear, (x, weights, counts)),
        (experts_npu.grouped_linear_backward, (grad, x, weights, counts)),
        (experts_npu.grouped_linear_backward, (grad, x, weights, counts, True)),
        (experts_npu.grouped_linear_main_grad, (x, weights, counts, [torch.zeros(4, 5)] * 3, False, [-1] * 3)),
    ):
        lowering, reasons = operator.choose("npu", args, {})
        assert lowering is not None and lowering.kernel.startswith("npu_grouped_matmul"), reasons
        have, want = lowering.build(*args), operator.overload(*args)
        for h, w in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (have, want)), strict=True):
            torch.testing.assert_close(h, w)
    for bad, reason in (
        ((x, weights[:1], counts), "experts is 1; valid: 2 to 128"),
        ((x, [w.half() for w in weights], counts), "valid: one type"),
        ((x.double(), weights, counts), "x is float64"),
    ):
        assert reason in experts_npu.grouped_linear.choose("npu", bad, {})[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@needs_npu
def test_cross_compiled(kind, tmp_path):
    from mindspeed_fx import cli

    script = tmp_path / "model.py"
    script.write_text(
        "import torch\n"
        "def make():\n"
        "    import mindspeed_fx.megatron_adaptor\n"
        "    from tests.megatron.gpt_models import batch, tiny_gpt\n"
        "    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed\n"
        "    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)\n"
        "    config = dict(hidden=64, ffn=48, bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=False, "
        f"**{KINDS[kind]!r})\n"
        "    return tiny_gpt(**config), (), batch()\n"
    )
    answer = tmp_path / "report.json"
    assert cli.main(["cross", f"{script}:make", "--no-baseline", "--no-kernels", "--json", str(answer)]) == 0
    report = json.loads(answer.read_text())
    (graph,) = report["graphs"]
    assert report["breaks"] == [] and report["without_gradient"] == []
    assert graph["counts"] | COUNTS == graph["counts"] and graph["counts"].get("fusion.weighted_swiglu", 0) == (
        2 if kind == "moe" else 0
    )
    forward, backward = ({o["operator"]: o["calls"] for o in s["operators"]} for s in graph["sides"])
    assert [side.get("npu.npu_grouped_matmul", 0) for side in (forward, backward)] == (
        [4, 8] if kind == "moe" else [0, 0]
    )
    assert not [c for c in (*forward, *backward) if "grouped_linear" in c]
    assert [r for r in graph["lowered"] if r["kernel"].startswith(("reference", "its own"))] == []
