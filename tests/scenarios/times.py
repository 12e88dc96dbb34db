"""Step times of larger scenarios beside Inductor's: forward, backward, both backends in one process by turns.

    python -m tests.scenarios.times [NAMES] [--rounds 15] [--out build/scenarios_runs]

Processor seconds of one thread, so that others on the machine count less; one line a scenario, kept in ``times.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import interleaved
from tests.scenarios import runner
from tests.scenarios.steps import loss_of


def lora() -> tuple[torch.nn.Module, Any]:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=2048,
        use_cache=False,
    )
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(task_type="CAUSAL_LM", r=8))
    ids = torch.randint(0, 2048, (4, 128))
    return model, dict(input_ids=ids, labels=ids)


def vit() -> tuple[torch.nn.Module, Any]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
    return model, dict(x=torch.randn(4, 3, 224, 224))


def unet() -> tuple[torch.nn.Module, Any]:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, dict(sample=torch.randn(4, 3, 32, 32), timestep=torch.tensor([3, 7, 1, 9]))


def dit() -> tuple[torch.nn.Module, Any]:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, num_layers=2, sample_size=32
    )
    return model, dict(
        hidden_states=torch.randn(2, 4, 32, 32), timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2])
    )


def decoder() -> tuple[torch.nn.Module, Any]:
    import x_transformers

    layers = x_transformers.Decoder(dim=256, depth=2, heads=4, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True)
    net = x_transformers.TransformerWrapper(num_tokens=2048, max_seq_len=256, attn_layers=layers)
    return x_transformers.AutoregressiveWrapper(net), dict(x=torch.randint(0, 2048, (4, 129)))


def bert() -> tuple[torch.nn.Module, Any]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=2048,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(0, 2048, (4, 128))
    return transformers.BertForMaskedLM(config), dict(input_ids=ids, labels=ids)


def mixtral() -> tuple[torch.nn.Module, Any]:
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=2048,
        use_cache=False,
    )
    ids = torch.randint(0, 2048, (4, 128))
    return transformers.MixtralForCausalLM(config), dict(input_ids=ids, labels=ids)


def t5() -> tuple[torch.nn.Module, Any]:
    import transformers

    config = transformers.T5Config(
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=2,
        num_heads=4,
        vocab_size=2048,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    ids = torch.randint(2, 2048, (4, 128))
    return transformers.T5ForConditionalGeneration(config), dict(input_ids=ids, labels=ids[:, :64].contiguous())


def whisper() -> tuple[torch.nn.Module, Any]:
    import transformers

    sides = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in dict(layers=2, attention_heads=4).items()}
    config = transformers.WhisperConfig(
        **sides,
        d_model=256,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        vocab_size=2048,
        pad_token_id=0,
        decoder_start_token_id=1,
        max_source_positions=128,
        dropout=0.0,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, dict(input_features=torch.randn(2, 80, 256), labels=torch.randint(2, 2048, (2, 64)))


def clip() -> tuple[torch.nn.Module, Any]:
    import transformers

    tower = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.CLIPConfig(
        text_config=tower | dict(vocab_size=2048, eos_token_id=2), vision_config=tower | dict(patch_size=16)
    )
    inputs = dict(input_ids=torch.randint(3, 2048, (4, 77)), pixel_values=torch.randn(4, 3, 224, 224))
    return transformers.CLIPModel(config), inputs | dict(return_loss=True)


def convnext() -> tuple[torch.nn.Module, Any]:
    import timm

    return timm.create_model("convnext_atto", num_classes=10), dict(x=torch.randn(2, 3, 224, 224))


def resnet() -> tuple[torch.nn.Module, Any]:
    import torchvision

    return torchvision.models.resnet18(num_classes=10), dict(x=torch.randn(4, 3, 112, 112))


WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "vocab_size")
"""What of a small configuration becomes four times as wide, and its heads with it where they have no width."""

LANGUAGE = {
    "CausalLM": ("causal/gpt2", "causal/bloom", "causal/gptj", "causal/gemma2", "mixture/deepseek_v3")
    + ("state_space/mamba", "state_space/recurrent_gemma"),
    "MaskedLM": ("masked/deberta-v2", "masked/modernbert", "masked/longformer", "masked/convbert", "masked/mobilebert")
    + ("masked/fnet", "masked/funnel", "masked/roformer"),
}
IMAGES: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": dict(depths=(2, 2), num_heads=(3, 6)),
    "xcit_nano_12_p16_224": dict(depth=2),
    "levit_128s": dict(depth=(1, 1, 1)),
    "pvt_v2_b0": dict(depths=(1, 1, 1, 1)),
    "beit_base_patch16_224": dict(embed_dim=192, depth=2, num_heads=3),
    "densenet121": dict(block_config=(2, 2, 2, 2)),
    "tinynet_e": {},
    "mobilenetv1_100": {},
    "resnet50": {},
    "regnetx_002": {},
    "mobilevitv2_050": {},
    "edgenext_xx_small": {},
}


def language(kind: str, task: str) -> tuple[torch.nn.Module, Any]:
    """A language model of transformers in moderate sizes, and a step's inputs."""
    import transformers

    from tests.scenarios import configs, encoders

    sizes = configs.sizes(transformers.AutoConfig.for_model(kind)) | encoders.OWN.get(kind, {})
    wide = {name: 4 * sizes[name] for name in WIDTHS if name in sizes}
    if "vocab_size" in wide:
        wide["vocab_size"] = 2048
    long = {name: 256 for name in ("max_position_embeddings", "n_positions") if name in sizes}
    config = configs.small(kind, **encoders.OWN.get(kind, {}) | wide | long)
    ids = torch.randint(3, 2048, (4, 128))
    return getattr(transformers, f"AutoModelFor{task}").from_config(config), dict(input_ids=ids, labels=ids)


def image(name: str) -> tuple[torch.nn.Module, Any]:
    """A model of timm with few layers, and a batch of images of its size."""
    import timm

    return timm.create_model(name, num_classes=10, **IMAGES[name]), dict(x=torch.randn(4, 3, 224, 224))


LARGER: dict[str, Callable[[], tuple[torch.nn.Module, Any]]] = {
    "peft/lora": lora,
    "transformers/masked/bert": bert,
    "timm/vit_tiny_patch16_224": vit,
    "x-transformers/decoder/rms_norm_swiglu": decoder,
    "diffusers/dit": dit,
    "diffusers/unet": unet,
    "transformers/mixture/mixtral": mixtral,
    "transformers/seq2seq/t5": t5,
    "transformers/audio/whisper": whisper,
    "transformers/pairs/clip": clip,
    "timm/convnext_atto": convnext,
    "torchvision/resnet18": resnet,
    **{f"transformers/{n}": partial(language, n.split("/")[1], task) for task, ns in LANGUAGE.items() for n in ns},
    **{f"timm/{name}": partial(image, name) for name in IMAGES},
}


def measure(build: Callable[[], tuple[torch.nn.Module, Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of a step by backend, and the median of a round's ratio of ours to Inductor's."""
    torch.manual_seed(0)
    model, inputs = build()
    steps = {}
    for backend in ("inductor", "mindspeed"):
        compiled = torch.compile(copy.deepcopy(model).train(), backend=backend)

        def step(compiled: Any = compiled) -> None:
            output = compiled(**inputs)
            (output if isinstance(output, torch.Tensor) and output.ndim == 0 else loss_of(output)).backward()

        steps[backend] = step
    times = interleaved(steps, rounds, clock="processor")
    ratios = [ours / torchs for ours, torchs in zip(times["mindspeed"], times["inductor"], strict=True)]
    return {name: statistics.median(t) for name, t in times.items()} | {"ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LARGER))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("build", "scenarios_runs"))
    args = parser.parse_args()
    runner.add_packages()
    torch.set_num_threads(1)
    for name in args.names:
        torch._dynamo.reset()
        seconds = measure(LARGER[name], args.rounds)
        line = {"name": name, **{k: round(v, 5) for k, v in seconds.items()}}
        print(json.dumps(line), flush=True)
        with open(args.out / "times.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
