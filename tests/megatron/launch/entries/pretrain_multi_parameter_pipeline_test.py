"""Stages that send two tensors, which mix in every layer."""

import functools

import torch
from megatron.training import get_args

from tests.megatron.launch.entries import layers


class TwoStreams(layers.Stage):
    """Two tensors in, two out."""

    def __init__(self, first, last):
        super().__init__(first, last)
        args = get_args()
        shape = {"shape": (args.micro_batch_size, args.hidden_size), "dtype": torch.float32}
        args.pipeline_tensor_shapes = [shape, dict(shape)]

    def forward(self, x, y):
        if self.received[0] is not None:
            x, y = self.received
        for layer in self.layers:
            x, y = torch.tanh(layer(x) + y), layer(y) * 0.5 + x
        return [x, y]


def forward_step(data_iterator, model):
    args = get_args()
    size = args.micro_batch_size, args.hidden_size
    x, y = torch.randn(size), torch.randn(size)
    return model(x, y), functools.partial(layers.square, torch.zeros(size))


if __name__ == "__main__":
    layers.run(TwoStreams, forward_step)
