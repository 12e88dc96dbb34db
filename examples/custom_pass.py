"""A pass of your own: fuse ``relu(x) ** 2`` (squared ReLU) before autograd sees it, and see it in the report.

    python examples/custom_pass.py
"""

import torch

import mindspeed_fx
from mindspeed_fx import passes

aten = torch.ops.aten


@passes.register("mine.squared_relu", stage="captured", level=1, exact=False)
def squared_relu(gm, context):
    """relu(x) ** 2 becomes x * relu(x), which needs no saved intermediate."""
    report = passes.PassReport("mine.squared_relu")
    for node in passes.calls(gm, aten.pow.Tensor_Scalar):
        relu, exponent = node.args
        if exponent == 2 and relu.target is aten.relu.default:
            node.target, node.args = aten.mul.Tensor, (relu.args[0], relu)
            report.rewrites.append(passes.site("x * relu(x)", node, [relu, node]))
    gm.recompile()
    return report


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)).square())


if __name__ == "__main__":
    report = mindspeed_fx.explain(MLP(), torch.randn(8, 64), options={"codegen": "eager", "check": "each"})
    print(report)
    print(report.sites("mine.squared_relu"))
