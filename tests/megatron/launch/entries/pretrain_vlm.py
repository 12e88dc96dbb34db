"""LLaVA by Megatron-core: a CLIP encoder, a projection and a language model, over random images with texts."""

import functools
from copy import deepcopy

import torch
from megatron.core.enums import ModelType
from megatron.core.models.multimodal import llava_model, llava_spec
from megatron.core.models.vision.clip_vit_model import get_num_image_embeddings
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


def image_tokens(args):
    """Of one image."""
    return get_num_image_embeddings(
        args.img_h, args.img_w, args.patch_dim, "clip", False, class_token_len=1, pixel_shuffle=False
    )


def provide(pre_process=True, post_process=True, **kwargs):
    args = get_args()
    config = core_transformer_config_from_args(args)
    vision, projection = deepcopy(config), deepcopy(config)
    vision.vision_model_type = "clip"
    spec = llava_spec.decoder_model_with_local_default_spec(None, False)
    return llava_model.LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=spec,
        language_vocab_size=args.padded_vocab_size,
        language_max_sequence_length=args.seq_length + image_tokens(args),
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=projection,
        vision_projection_layer_spec=deepcopy(spec.submodules.mlp.submodules),
        language_position_embedding_type="rope",
        pre_process=pre_process,
        post_process=post_process,
        img_h=args.img_h,
        img_w=args.img_w,
        patch_dim=args.patch_dim,
    )


def forward_step(data_iterator, model):
    """Texts of which the first token is an image."""
    import pretrain_gpt

    args = get_args()
    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(args.vocab_size, shape)
    tokens[:, 0] = llava_model.DEFAULT_IMAGE_TOKEN_INDEX
    labels, mask = torch.randint(args.vocab_size, shape), torch.ones(shape)
    mask[:, 0] = 0
    images = torch.randn(args.micro_batch_size, 3, args.img_h, args.img_w)
    places = torch.arange(args.seq_length).expand(shape)
    images = images.bfloat16() if args.bf16 else images
    loss, mask = model(images, tokens, places, None, labels, mask)
    return loss, functools.partial(pretrain_gpt.loss_func, mask)


if __name__ == "__main__":
    import pretrain_gpt

    data = pretrain_gpt.train_valid_test_datasets_provider
    data.is_distributed = True
    pretrain(data, provide, ModelType.encoder_or_decoder, forward_step)
