"""A pass of your own: ``log(softmax(x))`` becomes ``log_softmax(x)``, before autograd sees it; and see it in the report.

    python examples/custom_pass.py
"""

import torch

import mindspeed_fx
from mindspeed_fx import passes

aten = torch.ops.aten


@passes.register("mine.log_softmax", stage="captured", level=1)
def log_softmax(gm, context):
    """log(softmax(x)) becomes log_softmax(x), which saves one tensor less and has no log of zero."""
    report = passes.PassReport("mine.log_softmax")
    for log in passes.calls(gm, aten.log.default):
        softmax = log.args[0]
        if softmax.target is not aten.softmax.int:
            continue
        if len(softmax.users) > 1:
            report.skipped.append(passes.skip("log_softmax", log, "the softmax is used elsewhere too"))
            continue
        log.target, log.args = aten.log_softmax.int, softmax.args
        report.rewrites.append(passes.site("log_softmax", log, [softmax, log]))
    gm.recompile()
    return report


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)

    def forward(self, x):
        return torch.softmax(self.down(torch.tanh(self.up(x))), -1).log()


if __name__ == "__main__":
    report = mindspeed_fx.explain(Classifier(), torch.randn(8, 64), options={"codegen": "eager", "check": "each"})
    print(report)
    print(report.sites("mine.log_softmax"))
