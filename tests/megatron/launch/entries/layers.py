"""What the entry scripts here share: square layers divided over the stages, and pretraining on Megatron's mock data,
whose samples only count.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor, nn

LAYERS = 8


class Stage(nn.Module):
    """The layers of a stage; a subclass says what it makes of what it is sent."""

    share_embeddings_and_output_weights = False

    def __init__(self, first: bool, last: bool):
        super().__init__()
        args, stages = get_args(), parallel_state.get_pipeline_model_parallel_world_size()
        each = LAYERS // stages
        number = parallel_state.get_pipeline_model_parallel_rank() * each
        self.config = core_transformer_config_from_args(args)
        self.layers = nn.ModuleList(nn.Linear(args.hidden_size, args.hidden_size, bias=False) for _ in range(each))
        for i, layer in enumerate(self.layers):
            nn.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(number + i))
        self.pre_process, self.post_process = first, last
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.received: list[Tensor | None] = [None]

    def set_input_tensor(self, tensors: Tensor | list[Tensor | None]) -> None:
        """What the stage before has sent."""
        self.received = tensors if isinstance(tensors, list) else [tensors]


def run(stage: Callable[..., Stage], forward_step: Callable[..., Any]) -> None:
    """Megatron's pretraining of a model of these stages."""
    import pretrain_gpt

    def provide(pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> Stage:
        return stage(pre_process, post_process)

    data = pretrain_gpt.train_valid_test_datasets_provider
    data.is_distributed = True
    pretrain(data, provide, ModelType.encoder_or_decoder, forward_step)


def square(labels: Tensor, output: Tensor | list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean square of the (first) output beside its labels."""
    first = output[0] if isinstance(output, list) else output
    loss = (first - labels).square().mean()
    return loss, {"lm loss": loss.detach().clone()}
