"""Sums of which norms read rows are stored by rows, whatever order a convolution gave them."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.models import function_agrees

NAME = "canonicalize.row_layout"


def rms(x):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, (16,)),
    "rms_norm": lambda x: F.rms_norm(x, (16,)),
    "written out": rms,
    "in float32": lambda x: rms(x.float()).to(x.dtype),
}


def block(x, up, down, norm):
    return x + F.gelu(norm(x) @ up) @ down


def tokens(image, kernel, up, down, norm=NORMS["layer_norm"], block=block, after=lambda x: x.square().mean(1)):
    """Patches of an image through two blocks; ``after`` reads the residual stream."""
    x = F.conv2d(image, kernel, stride=4).flatten(2).transpose(1, 2) + 1
    return after(block(block(x, up, down, norm), up, down, norm))


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (2, 3, 12, 12), (16, 3, 4, 4), (16, 32), (32, 16)
    return tuple((torch.randn(s, dtype=dtype) / s[0] ** 0.5).requires_grad_() for s in shapes)


def agrees(dtype=torch.float64, **given):
    tolerance = 1e-9 if dtype == torch.float64 else 5e-2
    return function_agrees(lambda *a: tokens(*a, **given), *inputs(dtype), tolerance=tolerance)


@pytest.mark.parametrize("norm", [n for n in NORMS if n != "in float32"])
def test_the_first_sum_is_copied_and_the_rest_follows(norm):
    report = agrees(norm=NORMS[norm])
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@pytest.mark.parametrize("norm", ["layer_norm", "in float32"])
def test_in_bfloat16(norm):
    report = agrees(torch.bfloat16, norm=NORMS[norm])
    assert report.counts[NAME] == 1


def back_to_an_image(x):
    """As the convolutions between stages read it: a view of the order that the tokens had."""
    return F.avg_pool2d(x.transpose(1, 2).view(2, 16, 3, 3), 3)


def in_parts(x):
    first, second = x.chunk(2, -1)
    return (first * second.sigmoid()).square().mean(1)


@pytest.mark.parametrize("after", [back_to_an_image, in_parts])
def test_what_reads_the_old_order_gets_its_own(after):
    assert agrees(after=after).counts[NAME] == 1


@pytest.mark.parametrize("norm, kind", [("layer_norm", "layer_norm"), ("written out", "rms_norm")])
def test_norms_and_sums_stay_one(norm, kind):
    """Tokens without positions: a norm reads them as they are, and the first sum is that of a block."""

    def plain(image, kernel, up, down):
        x = F.conv2d(image, kernel, stride=4).flatten(2).transpose(1, 2)
        for _ in range(2):
            x = block(x, up, down, NORMS[norm])
        return NORMS[norm](x).square().mean(1)

    report = function_agrees(plain, *inputs())
    without = function_agrees(plain, *inputs(), disable=[NAME])
    assert report.counts[NAME] == 1 and NAME not in without.counts
    assert report.counts[f"fusion.{kind}"] == without.counts[f"fusion.{kind}"] == 3
    assert report.counts[f"fusion.add_{kind}"] == without.counts[f"fusion.add_{kind}"] == 2


def test_what_is_returned_keeps_its_strides():
    given = inputs()
    eager = tokens(*given, after=lambda x: x)
    run = torch.compile(tokens, backend="mindspeed", options={"codegen": "eager"})
    compiled = run(*given, after=lambda x: x)
    assert eager.stride() == compiled.stride() == (144, 1, 9)
    torch.testing.assert_close(compiled, eager)
    assert agrees(after=lambda x: (x, x * 2)).counts[NAME] == 1


@pytest.mark.parametrize("write, count", [(lambda x: x.reshape(18, 16), 1), (lambda x: x, 1), (lambda x: x[:, 1:], 0)])
def test_values_that_are_written_in_place(write, count):
    """What is a copy of the sum and would be a view of rows, and the sum: new values of the graph; a part of it stays a
    write."""

    def written(x):
        write(x).mul_(2)
        return x.square().mean(1)

    report = agrees(after=written)
    assert report.counts[NAME] == count
    assert all("is written in place" in s.reason for s in report.skipped(NAME)) and bool(report.skipped(NAME)) != count


def test_what_is_returned_with_its_detach_stays():
    report = agrees(after=lambda x: (x, x.detach()))
    assert report.counts[NAME] == 0 and "returned with its detach()" in report.skipped(NAME)[0].reason


def test_what_a_checkpointed_region_reads_stays():
    def region(x):
        return checkpoint(lambda y: F.layer_norm(y, (16,)).square(), x, use_reentrant=False).mean(1)

    report = agrees(after=region)
    assert report.counts[NAME] == 0 and "a graph of its own" in report.skipped(NAME)[0].reason


def test_images_stay():
    """Channels that lie together, of which means over columns are taken, and a sum that no norm reads."""

    def pooled(image, kernel, up, down):
        x = F.conv2d(image.contiguous(memory_format=torch.channels_last), kernel, stride=4) + 1
        x = F.group_norm(x, 4) + x
        return x.mean((2, 3)) @ up @ down

    report = function_agrees(pooled, *inputs())
    assert report.counts[NAME] == 0 and not report.skipped(NAME)


def test_sizes_that_are_symbols_stay():
    run = torch.compile(tokens, backend="mindspeed", dynamic=True, options={"codegen": "eager"})
    given = inputs()
    with recorder.collecting() as graphs:
        torch.testing.assert_close(run(*given), tokens(*given))
    report = Report(list(graphs), [])
    assert report.counts[NAME] == 0 and "symbols" in report.skipped(NAME)[0].reason
