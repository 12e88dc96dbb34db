"""A pass of your own: ``log(x + 1)`` becomes ``log1p(x)``, before autograd sees it; and see it in the report.

python examples/custom_pass.py
"""

import torch

import mindspeed_fx
from mindspeed_fx import passes

aten = torch.ops.aten


@passes.register("mine.log1p", stage="captured", level=1)
def log1p(gm, context):
    """log(x + 1) becomes log1p(x), which keeps the digits of a small x."""
    report = passes.PassReport("mine.log1p")
    for log in passes.calls(gm, aten.log.default):
        add = log.args[0]
        if add.target is not aten.add.Tensor or add.args[1:] != (1,) or add.kwargs:
            continue
        if len(add.users) > 1:
            report.skipped.append(passes.skip("log1p", log, "the sum is used elsewhere too"))
            continue
        log.target, log.args = aten.log1p.default, add.args[:1]
        report.rewrites.append(passes.site("log1p", log, [add, log]))
    gm.recompile()
    return report


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)

    def forward(self, x):
        return (self.down(self.up(x).square()).square() + 1).log()


if __name__ == "__main__":
    report = mindspeed_fx.explain(Model(), torch.randn(8, 64), options={"codegen": "eager", "check": "each"})
    print(report)
    print(report.sites("mine.log1p"))
