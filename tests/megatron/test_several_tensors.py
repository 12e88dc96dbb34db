"""``--use-multiparameter-pipeline-model-parallel``: stages that send two tensors, against the model whole."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from torch import nn

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import several_tensors
from tests import ranks

MICROBATCHES, ROWS, WIDTH = 5, 3, 8
SHAPES = [{"shape": (ROWS, WIDTH), "dtype": torch.float64}, {"shape": (ROWS, 2 * WIDTH)}]


class Stage(nn.Module):
    """Two streams of different widths that mix in every layer."""

    def __init__(self, layers):
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(layers))
        self.received = [None]

    def set_input_tensor(self, tensors):
        self.received = tensors

    def forward(self, x):
        narrow, wide = (x, torch.cat((x, -x), -1)) if self.received[0] is None else self.received
        for a, b in zip(self.narrow, self.wide):
            narrow, wide = torch.tanh(a(narrow) + wide[:, :WIDTH]), torch.tanh(b(wide) * narrow.repeat(1, 2))
        return [narrow * 1.0, wide * 1.0]  # not views, as what Megatron sends


def whole():
    torch.manual_seed(0)
    return Stage(4).double()


def loss_of(outputs):
    narrow, wide = outputs
    loss = narrow.square().sum() + (wide * 0.5).sum()
    return loss, {"loss": loss.detach().clone()}


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(MICROBATCHES)]


def on_rank(rank, folder, frees):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.enums import ModelType

    import mindspeed_fx.megatron_adaptor  # noqa: F401

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(1, pipeline_model_parallel_size=2)
    from megatron.core.pipeline_parallel import schedules

    arguments = Namespace(use_multiparameter_pipeline_model_parallel=True, pipeline_tensor_shapes=SHAPES)
    several_tensors.training_arguments = lambda: arguments
    full, stage = whole(), Stage(2).double()
    for ours, theirs in ((stage.narrow, full.narrow), (stage.wide, full.wide)):
        for own, other in zip(ours, theirs[2 * rank : 2 * rank + 2]):
            own.load_state_dict(other.state_dict())
    stage.config = ModelParallelConfig(
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float64, deallocate_pipeline_outputs=frees
    )
    stage.config.hidden_size, stage.share_embeddings_and_output_weights = WIDTH, False
    stage.config.fine_grained_activation_offloading = False  # the schedule asks a TransformerConfig
    stage.pre_process, stage.post_process = rank == 0, rank == 1
    stage.model_type = ModelType.encoder_or_decoder

    def step(iterator, model):
        return model(next(iterator)), loss_of

    run = schedules.get_forward_backward_func()
    losses = run(
        forward_step_func=step,
        data_iterator=iter(data()),
        model=stage,
        num_microbatches=MICROBATCHES,
        seq_length=ROWS,
        micro_batch_size=1,
    )
    if rank == 1:
        expected = [loss_of(full(x))[0].item() for x in data()]
        assert [x["loss"].item() for x in losses] == pytest.approx(expected, rel=1e-12)
    (sum(loss_of(full(x))[0] for x in data()) / MICROBATCHES).backward()
    for ours, theirs in ((stage.narrow, full.narrow), (stage.wide, full.wide)):
        for own, other in zip(ours, theirs[2 * rank : 2 * rank + 2]):
            for mine, wanted in zip(own.parameters(), other.parameters()):
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-10, atol=1e-12)
    dist.destroy_process_group()


@pytest.mark.parametrize("frees", [False, True])
def test_two_stages(tmp_path, frees):
    """Losses and every gradient are those of the model whole, also where outputs are freed once they are sent."""
    ranks.spawn(on_rank, (tmp_path, frees))


def test_shapes_are_read_or_refused():
    assert several_tensors.read_shapes(SHAPES, torch.float64) == [(ROWS, WIDTH), (ROWS, 2 * WIDTH)]
    for wrong in ([], [(3, 4)], "none", [{"dtype": torch.float32}]):
        with pytest.raises(OptionError, match="a list of"):
            several_tensors.read_shapes(wrong, torch.float64)
    with pytest.raises(OptionError, match="torch.float32 is expected, the type of Megatron's messages"):
        several_tensors.read_shapes(SHAPES, torch.float32)


def test_without_the_flag_nothing_changes(monkeypatch):
    monkeypatch.setattr(several_tensors.patches, "original", lambda name: lambda **kwargs: [(6, 2, 4)])
    monkeypatch.setattr(several_tensors, "training_arguments", lambda: Namespace(pipeline_tensor_shapes=SHAPES))
    assert several_tensors.get_tensor_shapes(config=Namespace(pipeline_dtype=torch.float64)) == [(6, 2, 4)]
