"""Audio models of transformers, and of time series."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios import configs
from tests.scenarios.steps import train
from tests.scenarios.table import scenario

WAVES = dict(
    conv_dim=[16, 16],
    conv_stride=[2, 2],
    conv_kernel=[4, 4],
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    classifier_proj_size=16,
)
KINDS = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "sew", "wav2vec2-conformer")


@scenario("transformers/audio/{}", KINDS)
def run_waves(run: Any, kind: str) -> Any:
    from transformers import AutoModelForAudioClassification

    own = WAVES | (dict(squeeze_factor=2) if kind == "sew" else {})
    model = AutoModelForAudioClassification.from_config(configs.small(kind, num_labels=6, **own))
    # in evaluation mode, which has gradients too: in training it asks for them within forward
    return train(run, model.eval(), dict(input_values=torch.randn(2, 90), labels=torch.tensor([1, 4])))


@scenario("transformers/audio/ctc")
def run_ctc(run: Any) -> Any:
    from transformers import Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(configs.small("wav2vec2", ctc_loss_reduction="mean", **WAVES)).eval()
    return train(run, model, dict(input_values=torch.randn(2, 90), labels=torch.randint(3, 60, (2, 4))))


@scenario("transformers/audio/{}", ("whisper", "speech_to_text", "audio-spectrogram-transformer"))
def run_spectra(run: Any, kind: str) -> Any:
    import transformers

    labels = torch.randint(3, 60, (2, 6))
    if kind == "whisper":
        config = configs.small("whisper", max_source_positions=16, max_target_positions=32, decoder_start_token_id=1)
        model, size = transformers.WhisperForConditionalGeneration(config), (2, 16, 32)
        return train(run, model, dict(input_features=torch.randn(*size), labels=labels))
    if kind == "speech_to_text":
        config = configs.small(
            "speech_to_text",
            input_feat_per_channel=16,
            conv_channels=32,
            max_source_positions=32,
            max_target_positions=32,
            decoder_start_token_id=1,
        )
        model = transformers.Speech2TextForConditionalGeneration(config)
        return train(run, model, dict(input_features=torch.randn(2, 32, 16), labels=labels))
    config = configs.small("audio-spectrogram-transformer", max_length=32, frequency_stride=8, time_stride=8)
    model = transformers.ASTForAudioClassification(config)
    return train(run, model, dict(input_values=torch.randn(2, 32, 16), labels=torch.tensor([1, 0])))


@scenario("transformers/audio/encodec")
def run_encodec(run: Any) -> Any:
    from transformers import EncodecConfig, EncodecModel

    config = EncodecConfig(num_filters=4, hidden_size=16, upsampling_ratios=[4, 2], codebook_size=16, codebook_dim=16)
    model = EncodecModel(config).eval()
    return train(run, model.encoder, (torch.randn(2, 1, 64),))


@scenario("transformers/series/{}", ("patchtst", "patchtsmixer", "time_series_transformer", "decision_transformer"))
def run_series(run: Any, kind: str) -> Any:
    import transformers

    if kind == "patchtst":
        config = transformers.PatchTSTConfig(
            num_input_channels=2,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            prediction_length=8,
            d_model=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            head_dropout=0.0,
            loss="mse",
        )
        model = transformers.PatchTSTForPrediction(config)
        return train(run, model, dict(past_values=torch.randn(2, 32, 2), future_values=torch.randn(2, 8, 2)))
    if kind == "patchtsmixer":
        config = transformers.PatchTSMixerConfig(
            num_input_channels=2,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            prediction_length=8,
            d_model=16,
            num_layers=2,
            dropout=0.0,
            head_dropout=0.0,
        )
        model = transformers.PatchTSMixerForPrediction(config)
        return train(run, model, dict(past_values=torch.randn(2, 32, 2), future_values=torch.randn(2, 8, 2)))
    if kind == "time_series_transformer":
        config = configs.small(
            "time_series_transformer", prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2
        )
        model = transformers.TimeSeriesTransformerForPrediction(config)
        return train(
            run,
            model,
            dict(
                past_values=torch.rand(2, 10),
                past_time_features=torch.randn(2, 10, 2),
                past_observed_mask=torch.ones(2, 10),
                future_values=torch.rand(2, 4),
                future_time_features=torch.randn(2, 4, 2),
            ),
            lr=0.01,
        )
    model = transformers.DecisionTransformerModel(configs.small("decision_transformer", state_dim=5, act_dim=3))
    return train(
        run,
        model,
        dict(
            states=torch.randn(2, 6, 5),
            actions=torch.randn(2, 6, 3),
            rewards=torch.randn(2, 6, 1),
            returns_to_go=torch.randn(2, 6, 1),
            timesteps=torch.arange(6).expand(2, 6),
            attention_mask=torch.ones(2, 6),
        ),
    )
