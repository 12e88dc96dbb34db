"""Micro-batches whose length only the first stage knows before they come."""

import functools

import torch
from megatron.training import get_args

from tests.megatron.launch.entries import layers


class Lengths(layers.Stage):
    """Layers of every position."""

    def forward(self, x):
        if self.received[0] is not None:
            x = self.received[0]
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def forward_step(data_iterator, model):
    args = get_args()
    length = int(torch.randint(10, 100, ()))
    output = model(torch.randn(args.micro_batch_size, length, args.hidden_size))
    return output, functools.partial(layers.square, torch.zeros(()))


if __name__ == "__main__":
    layers.run(Lengths, forward_step)
