"""A causal depthwise convolution and its SiLU become one operator."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.report import recorder
from tests.models import explain, function_agrees
from tests.transformers_parts import part_of

NAME = "fusion.causal_conv1d"


def inputs(dtype=torch.float64, channels=6, size=4, seq=9):
    torch.manual_seed(0)
    shapes = ((2, channels, seq), (channels, 1, size), (channels,))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def convolved(x, weight, bias, silu=True, ahead=False, cut=0, step=1, written_out=False):
    seq, size = x.shape[2], weight.shape[2]
    if ahead:
        y = F.conv1d(F.pad(x, (size - 1, 0)), weight, bias, groups=x.shape[1])
    else:
        y = F.conv1d(x, weight, bias, stride=step, padding=size - 1, groups=x.shape[1])[:, :, cut : seq + cut]
    if written_out:
        return y * torch.sigmoid(y)
    return F.silu(y) if silu else y


def of_transformers(x, weight, bias):
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

    return causal_conv1d_fn(x, weight.squeeze(1), bias, activation="silu")


def need_convolution():
    part_of("models.mamba2.modeling_mamba2", "causal_conv1d_fn")  # transformers 4 has it of another package alone


def skips(report):
    return [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize(
    "f",
    [
        convolved,
        of_transformers,
        lambda x, w, b: convolved(x, w, None, silu=False, ahead=True) * b[:, None],
        pytest.param(lambda x, w, b: convolved(x, w, b, written_out=True), marks=pytest.mark.slow),
        lambda x, w, b: convolved(x.transpose(1, 2).contiguous().transpose(1, 2), w, b).transpose(1, 2),
    ],
)
def test_spellings(f):
    if f is of_transformers:
        need_convolution()
    report = function_agrees(f, *inputs())
    assert report.counts[NAME] == 1 and not skips(report), skips(report)


def test_narrow():
    need_convolution()
    report = function_agrees(of_transformers, *inputs(torch.bfloat16), tolerance=2e-2)
    assert report.counts[NAME] == 1


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"cut": 1}, "more is read of the convolution than the outputs of its tokens"),
        ({"step": 2}, "stride 2 and dilation 1: only 1 and 1 are a shift by a token each"),
    ],
)
def test_near_misses(given, reason):
    report = function_agrees(lambda *a: convolved(*a, **given), *inputs())
    assert report.counts[NAME] == 0 and skips(report) == [reason], skips(report)


def test_same_padding_is_not_causal():
    report = function_agrees(lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=6), *inputs(size=3))
    assert report.counts[NAME] == 0 and skips(report) == ["padding [1] with 3 weights is not causal"]


def test_other_convolutions_are_no_near_miss():
    x, weight, bias = inputs()
    whole = torch.randn(6, 6, 4, dtype=torch.float64, requires_grad=True)
    report = function_agrees(lambda x, w, b: F.conv1d(x, w, b, padding=3)[..., :9], x, whole, bias)
    assert report.counts[NAME] == 0 and not skips(report)


def test_on_accelerators():
    report = explain(convolved, *inputs(torch.float32), target="cuda", hardware="h100")
    assert report.counts[NAME] == 1
    report = explain(convolved, *inputs(torch.float32), target="npu", hardware="ascend910b2")
    assert report.counts[NAME] == 0 and not skips(report)
    notes = [n for run in report.graphs[0].runs if run.report.name == NAME for n in run.report.notes]
    assert notes == ["on npu the model's convolution stays"]


@pytest.mark.parametrize(("enable", "count"), [([], 0), ([NAME], 1)])
def test_beside_generated_code_it_is_fused_on_request_alone(enable, count):
    torch._dynamo.reset()
    with recorder.modelling() as graphs:  # up to generating code
        options = {"codegen": "inductor", "enable": enable}
        torch.compile(convolved, backend="mindspeed", options=options)(*inputs(torch.float32)).sum().backward()
    (report,) = [r.report for r in graphs[0].runs if r.report.name == NAME]
    assert len(report.rewrites) == count
    assert [s.reason.startswith("on cpu the model's convolution") for s in report.skipped] == [True] * (1 - count)
