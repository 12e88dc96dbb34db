"""Modules of torch: parametrizations, states, copies, recurrent and convolutional layers, quantization in training."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

from tests.scenarios.hooks import Stack, batch
from tests.scenarios.steps import infer, train
from tests.scenarios.table import scenario


@scenario("torch.nn/parametrize/{}", ("weight_norm", "spectral_norm", "orthogonal", "own", "cached"))
def run_parametrize(run: Any, kind: str) -> Any:
    model = Stack(1)

    class Symmetric(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).T

    for layer in (model.layers[0].out, model.layers[0].down):
        if kind in ("own", "cached"):
            if layer.in_features == layer.out_features:
                parametrize.register_parametrization(layer, "weight", Symmetric())
        else:
            getattr(parametrizations, kind)(layer)
    if kind == "cached":
        with parametrize.cached():
            return train(run, model, batch(), steps=1)
    return train(run, model, batch())


@scenario("torch.nn/old_weight_norm")
def run_old_weight_norm(run: Any) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    model = Stack(1)
    torch.nn.utils.weight_norm(model.layers[0].out)
    return train(run, model, batch())


@scenario("torch.nn/pruning")
def run_pruning(run: Any) -> Any:
    from torch.nn.utils import prune

    model = Stack(1)
    prune.l1_unstructured(model.layers[0].up, "weight", 0.3)
    return train(run, model, batch())


@scenario("torch.nn/state_dict_round_trip")
def run_state(run: Any) -> Any:
    model, x = Stack(1), batch()[0]
    compiled = run.compile(model)
    first = compiled(x)
    state = {k.removeprefix("_orig_mod."): v.clone() + 0.01 for k, v in compiled.state_dict().items()}
    model.load_state_dict(state)
    second = compiled(x)
    model.load_state_dict(state, assign=True)
    return {"first": first, "second": second, "assigned": compiled(x), "state": model.state_dict()}


@scenario("torch.nn/deepcopy_of_compiled")
def run_deepcopy(run: Any) -> Any:
    compiled, x = run.compile(Stack(1)), batch()[0]
    compiled(x).mean().backward()
    other = copy.deepcopy(compiled)
    for p in other.parameters():
        p.data.add_(0.01)
        p.grad = None
    out = other(x)
    out.square().mean().backward()
    return {"out": out, "first": compiled(x), "gradients": [p.grad for p in other.parameters()]}


@scenario("torch.nn/pickle_of_module_compile")
def run_pickle(run: Any) -> Any:
    """``module.compile()`` in place, which pickles as the module."""
    model, x = Stack(1), batch()[0]
    if run.name:
        model.compile(backend=run.name)
    out = model(x)
    out.mean().backward()
    other = pickle.loads(pickle.dumps(model))
    return {"out": out, "other": other(x)}


@scenario("torch.nn/save_and_load_whole")
def run_save(run: Any) -> Any:
    compiled, x = run.compile(Stack(1)), batch()[0]
    first = compiled(x)
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    return {"first": first, "loaded": torch.load(file, weights_only=False)(x)}


@scenario("torch.nn/compile_each_layer")
def run_regional(run: Any) -> Any:
    model = Stack(3)
    for layer in model.layers if run.name else ():
        layer.compile(backend=run.name)
    return train(type("Whole", (), {"compile": staticmethod(lambda m: m)}), model, batch())


@scenario("torch.nn/swa/{}", ("swa", "ema", "ema_buffers"))
def run_averages(run: Any, kind: str) -> Any:
    from torch.optim import swa_utils

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.SiLU(), torch.nn.Linear(16, 4)
    )
    compiled, x = run.compile(model), torch.randn(16, 8)
    how = {} if kind == "swa" else dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    average = swa_utils.AveragedModel(model, use_buffers=kind == "ema_buffers", **how)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss)
    if kind == "swa":
        swa_utils.update_bn([x], average)
    return {"losses": losses, "state": average.state_dict(), "averaged": run.compile(average)(x)}


@scenario("torch.nn/fake_quantize/{}", ("per_tensor", "per_channel", "learned"))
def run_fake_quantize(run: Any, kind: str) -> Any:
    import torch.ao.quantization as quant

    class Quantized(Stack):
        def __init__(self) -> None:
            super().__init__(1)
            observer = (
                quant.MovingAveragePerChannelMinMaxObserver
                if kind == "per_channel"
                else quant.MovingAverageMinMaxObserver
            )
            how = dict(ch_axis=0, qscheme=torch.per_channel_symmetric) if kind == "per_channel" else {}
            self.weights = quant.FakeQuantize(observer, quant_min=-128, quant_max=127, dtype=torch.qint8, **how)
            self.scale = torch.nn.Parameter(torch.tensor([0.05]))
            self.zero = torch.nn.Parameter(torch.tensor([0.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            if kind == "learned":
                x = torch._fake_quantize_learnable_per_tensor_affine(x, self.scale, self.zero, -128, 127, 1.0)
            return torch.nn.functional.linear(x, self.weights(self.head.weight), self.head.bias)

    model = Quantized()
    return train(run, model, batch()) | {"buffers": dict(model.named_buffers())}


@scenario("torch.nn/recurrent/{}", ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"))
def run_recurrent(run: Any, kind: str) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = getattr(torch.nn, kind)(8, 16)

        def forward(self, x: torch.Tensor) -> Any:
            if not kind.endswith("Cell"):
                return self.layer(x)[0]
            state = None
            for one in x:
                state = self.layer(one, state)
            return state

    return train(run, Model(), (torch.randn(5, 2, 8),))


@scenario("torch.nn/packed_lstm")
def run_packed(run: Any) -> Any:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = torch.nn.LSTM(8, 16, batch_first=True, bidirectional=True), torch.nn.Linear(32, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])

    return train(run, Model(), (torch.randn(3, 6, 8), torch.tensor([6, 3, 5])))


@scenario("torch.nn/batch_norm_momentum_none")
def run_batch_norm(run: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, momentum=None), torch.nn.ReLU())
    return train(run, model, (torch.randn(2, 3, 8, 8),)) | {"state": model.state_dict()}


@scenario("torch.nn/transformer/{}", ("encoder", "decoder", "whole", "fast_path"))
def run_transformer(run: Any, kind: str) -> Any:
    how = dict(d_model=32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, 6, 32), torch.randn(2, 7, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    if kind == "whole":
        model = torch.nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **how)
        return train(run, model, dict(src=memory, tgt=x, tgt_mask=mask))
    if kind == "decoder":
        model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(norm_first=True, **how), 2)
        return train(run, model, dict(tgt=x, memory=memory, tgt_mask=mask, tgt_is_causal=True))
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(**how), 2, enable_nested_tensor=False)
    inputs = dict(src=x, src_key_padding_mask=padding)
    return infer(run, model, inputs) if kind == "fast_path" else train(run, model, inputs)


@scenario("torch.nn/multihead_attention/{}", ("weights", "own_widths", "zero_attention", "added_keys"))
def run_multihead(run: Any, kind: str) -> Any:
    how: dict[str, Any] = dict(batch_first=True)
    how |= {"own_widths": dict(kdim=16, vdim=8), "zero_attention": dict(add_zero_attn=True)}.get(kind, {})
    how |= dict(add_bias_kv=True) if kind == "added_keys" else {}
    model = torch.nn.MultiheadAttention(32, 4, **how)
    k, v = (torch.randn(2, 5, 16), torch.randn(2, 5, 8)) if kind == "own_widths" else (torch.randn(2, 5, 32),) * 2
    return train(run, model, dict(query=torch.randn(2, 6, 32), key=k, value=v, need_weights=kind == "weights"))


@scenario(
    "torch.nn/losses/{}", ("ctc", "triplet", "cosine", "gaussian", "poisson", "kl", "multi_margin", "huber", "hinge")
)
def run_losses(run: Any, kind: str) -> Any:
    x, y = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    classes, sign = torch.randint(0, 8, (6,)), torch.tensor([1, -1, 1, 1, -1, 1])
    steps = {
        "ctc": lambda x: torch.nn.CTCLoss()(
            x.log_softmax(-1)[:, None], torch.tensor([[1, 3]]), torch.tensor([6]), torch.tensor([2])
        ),
        "triplet": lambda x: torch.nn.TripletMarginLoss()(x, y, y.flip(0)),
        "cosine": lambda x: torch.nn.CosineEmbeddingLoss()(x, y, sign),
        "gaussian": lambda x: torch.nn.GaussianNLLLoss()(x, y, y.square() + 0.1),
        "poisson": lambda x: torch.nn.PoissonNLLLoss()(x, y.abs()),
        "kl": lambda x: torch.nn.KLDivLoss(reduction="batchmean")(x.log_softmax(-1), y.softmax(-1)),
        "multi_margin": lambda x: torch.nn.MultiMarginLoss()(x, classes),
        "huber": lambda x: torch.nn.HuberLoss()(x, y) + torch.nn.SmoothL1Loss(beta=0.3)(x, y),
        "hinge": lambda x: (
            torch.nn.HingeEmbeddingLoss()(x[:, 0], sign) + torch.nn.SoftMarginLoss()(x[:, 1], sign.float())
        ),
    }
    loss = run.compile(steps[kind])(x)
    loss.backward()
    return {"loss": loss, "gradient": x.grad}
