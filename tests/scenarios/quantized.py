"""torchao: quantized weights, and float8 and int8 training, on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.steps import infer, train
from tests.scenarios.table import scenario

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8_weight_only": ("Int8WeightOnlyConfig", {}),
    "int8_dynamic": ("Int8DynamicActivationInt8WeightConfig", {}),
    "float8_weight_only": ("Float8WeightOnlyConfig", {}),
    "int4_weight_only": ("Int4WeightOnlyConfig", dict(group_size=32)),
    "intx_weight_only": ("IntxWeightOnlyConfig", dict(weight_dtype=torch.int4)),
    "int8_dynamic_intx": ("Int8DynamicActivationIntxWeightConfig", dict(weight_dtype=torch.int4)),
}


def preload() -> None:
    import torchao  # noqa: F401
    import torchao.float8  # noqa: F401
    import torchao.quantization  # noqa: F401


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 64), torch.nn.RMSNorm(64)
    )


@scenario("torchao/quantize/{}", CONFIGS)
def run_quantize(run: Any, kind: str) -> Any:
    import torchao.quantization as quantization

    name, how = CONFIGS[kind]
    model = net().bfloat16() if kind == "int4_weight_only" else net()
    quantization.quantize_(model, getattr(quantization, name)(**how))
    dtype = torch.bfloat16 if kind == "int4_weight_only" else torch.float32
    return infer(run, model, (torch.randn(4, 64).to(dtype),))


@scenario("torchao/quantize_transformers")
def run_quantize_model(run: Any) -> Any:
    import torchao.quantization as quantization

    from tests.scenarios.trainer import model, rows

    one = model().eval()
    quantization.quantize_(one, quantization.Int8WeightOnlyConfig())
    ids = torch.stack([row["input_ids"] for row in rows(2)])
    with torch.no_grad():
        return run.compile(one)(input_ids=ids, use_cache=False).logits


@scenario("torchao/qat/{}", ("int8_dynamic_int4_weight", "int4_weight"))
def run_qat(run: Any, kind: str) -> Any:
    import torchao.quantization as quantization
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = net()
    weight = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    active = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if kind.startswith("int8") else None
    config = QATConfig(activation_config=active, weight_config=weight, step="prepare")
    quantization.quantize_(model, config)
    return train(run, model, (torch.randn(4, 64),), steps=1)


@scenario("torchao/float8_training/{}", ("tensorwise", "rowwise", "emulated"))
def run_float8(run: Any, kind: str) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if kind == "rowwise":
        config = Float8LinearConfig.from_recipe_name("rowwise")
    else:
        config = Float8LinearConfig(emulate=kind == "emulated")
    model = convert_to_float8_training(net().bfloat16(), config=config)
    return train(run, model, (torch.randn(16, 64, dtype=torch.bfloat16),), lr=0.01)


@scenario("torchao/int8_training")
def run_int8_training(run: Any) -> Any:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    model = net()
    quantize_(model, int8_weight_only_quantized_training())
    compiled = run.compile(model)
    loss = torch.nn.functional.mse_loss(compiled(torch.randn(16, 64)), torch.randn(16, 64))
    loss.backward()
    return {"loss": loss, "gradients": [p.grad for p in model.parameters()]}


@scenario("torchao/optimizer/{}", ("AdamW8bit", "AdamWFp8"))
def run_optimizer(run: Any, kind: str) -> Any:
    """Its optimizers compile their own step with torch.compile's default; the model is ours."""
    from torchao import optim

    model = torch.nn.Linear(128, 128)
    optimizer = getattr(optim, kind)(model.parameters(), lr=1e-3)
    compiled, losses = run.compile(model), []
    for x in torch.randn(2, 4, 128):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return {"losses": losses}
