"""Models of transformers whose operators are spelled otherwise for a CUDA device than on CPU."""

import copy

import pytest
import torch

from mindspeed_fx.report import recorder

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "kind, fused, settings",
    [
        ("mamba", {"fusion.selective_scan": 2, "fusion.causal_conv1d": 2}, {"intermediate_size": 128}),
        (
            "mamba2",
            {"fusion.ssd": 2, "fusion.causal_conv1d": 2},
            {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 32},
        ),
    ],
)
def test_state_spaces(kind, fused, settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=64, num_hidden_layers=2, vocab_size=100, state_size=16, use_cache=False, **settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config).cuda().train()
    exact = copy.deepcopy(model).double()
    ids = torch.randint(100, (2, 64), device="cuda")
    want = exact(ids, labels=ids).loss
    want.backward()
    with recorder.collecting() as graphs:
        got = torch.compile(model, backend="mindspeed")(ids, labels=ids).loss
    got.backward()
    assert abs(got.item() - want.item()) < 1e-5
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is not None and (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-7, name
    found = {r.report.name: len(r.report.rewrites) for g in graphs for r in g.runs}
    assert {name: found.get(name) for name in fused} == fused
