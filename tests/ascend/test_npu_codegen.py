"""What runs on a machine with an NPU, as far as it can be checked without: codegens, and passes that others
installed.
"""

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from mindspeed_fx.compat import inductor
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from tests.ascend.npu_process import needs_npu, worker


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def compiled(**options):
    return torch.compile(Norm(), backend="mindspeed", options=options)


def test_npugraph_ex_is_for_npu_and_needs_torch_npu():
    with pytest.raises(OptionError, match='"npugraph_ex", which runs on npu; the target is "cpu"'):
        Options(codegen="npugraph_ex").resolve("cpu")
    assert (
        Options(codegen="npugraph_ex").resolve("npu").codegen == "npugraph_ex"
        and Options().resolve("npu").codegen == "eager"
    )
    with pytest.raises(OptionError, match='"npugraph_ex" is for codegen "npugraph_ex"; codegen is "auto"'):
        Options(npugraph_ex={"force_eager": True})
    with pytest.raises(OptionError, match="takes a dict"):
        Options(npugraph_ex=3, codegen="npugraph_ex")
    with pytest.raises(Exception, match="torch_npu is not installed"):
        compiled(codegen="npugraph_ex", target="npu")(torch.randn(2, 8))


class Mark(inductor.CustomPass):
    """A pass of somebody else's; ``saw`` are the operators it was shown."""

    def __init__(self):
        self.saw = []

    def __call__(self, graph):
        self.saw.append([str(n.target) for n in graph.nodes if n.op in ("call_function", "call_method")])

    def uuid(self):
        return "somebody's"

    def __reduce__(self):
        return (str, ("somebody's",))


@pytest.mark.parametrize("where", ["installed", "option"])
def test_passes_in_inductors_hooks_run_before_ours(where):
    pre, post = Mark(), Mark()
    hooks = {"pre_grad_custom_pass": pre, "post_grad_custom_post_pass": post}
    x = torch.randn(4, 64)
    with (
        inductor_config.patch({"fx_graph_cache": False, **(hooks if where == "installed" else {})}),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        y = compiled(**({"inductor": hooks} if where == "option" else {}))(x)
    torch.testing.assert_close(y, Norm()(x))
    # Theirs sees the graph as Dynamo made it, which ours replaces, and the graph that Inductor lowers.
    assert (
        pre.saw
        and any("rsqrt" in op for op in pre.saw[0])
        and not any("mindspeed" in op for op in pre.saw[0])
        and post.saw
    )


def test_a_chain_is_known_to_caches_only_when_every_pass_is():
    assert inductor.ChainedPass([Mark(), Mark()]).uuid() == repr(["somebody's"] * 2)
    assert inductor.ChainedPass([Mark(), lambda graph: None]).uuid() is None


@pytest.mark.slow
@needs_npu
def test_npugraph_ex_takes_our_graphs_forward_and_backward():
    found = worker("npugraph_ex")
    assert found["sides"] == ["forward", "backward"] and found["without_gradient"] == [] and found["compiled"] == 2
    assert "levle" in found["bad option"]
