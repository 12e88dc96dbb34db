"""Encoders and encoder-decoders of transformers: a step of training with labels."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios import configs
from tests.scenarios.steps import train
from tests.scenarios.table import scenario

MASKED = (
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet", "camembert", "layoutlm"),
    *("longformer", "convbert", "fnet", "megatron-bert", "mobilebert", "roformer", "squeezebert", "rembert"),
    *("modernbert", "data2vec-text", "esm", "funnel"),
)
SEQUENCES = (
    *("t5", "mt5", "bart", "mbart", "pegasus", "marian", "blenderbot", "led", "m2m_100", "longt5", "umt5"),
    *("switch_transformers", "prophetnet", "plbart"),
)
OWN: dict[str, dict[str, Any]] = {
    "distilbert": dict(n_heads=4),
    "longformer": dict(attention_window=8),
    "led": dict(attention_window=8),
    "mobilebert": dict(intra_bottleneck_size=32, true_hidden_size=32, embedding_size=32),
    "funnel": dict(block_sizes=[1, 1], d_head=16, num_decoder_layers=1, d_inner=96),
    "longt5": dict(local_radius=7),
    "switch_transformers": dict(num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4),
    "esm": dict(mask_token_id=2, position_embedding_type="rotary", token_dropout=False),
    "deberta-v2": dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    "deberta": dict(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
    "prophetnet": dict(num_encoder_attention_heads=4, num_decoder_attention_heads=4, decoder_start_token_id=1),
    "modernbert": dict(local_attention=8, global_attn_every_n_layers=2),
}


@scenario("transformers/masked/{}", MASKED)
def run_masked(run: Any, kind: str) -> Any:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_config(configs.small(kind, **OWN.get(kind, {}))).train()
    ids = torch.randint(3, 100, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return train(run, model, dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(ids % 3 > 0, -100)))


@scenario("transformers/seq2seq/{}", SEQUENCES)
def run_sequences(run: Any, kind: str) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    start = dict(decoder_start_token_id=0) | OWN.get(kind, {})
    model = AutoModelForSeq2SeqLM.from_config(configs.small(kind, **start)).train()
    ids, labels = torch.randint(3, 100, (2, 16)), torch.randint(3, 100, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return train(run, model, dict(input_ids=ids, attention_mask=mask, labels=labels))


@scenario("transformers/sequence_classification/{}", ("bert", "llama", "deberta-v2"))
def run_classes(run: Any, kind: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(configs.small(kind, num_labels=3, **OWN.get(kind, {})))
    ids = torch.randint(3, 100, (2, 16))
    return train(run, model.train(), dict(input_ids=ids, labels=torch.tensor([0, 2])))


@scenario("transformers/token_classification")
def run_tokens(run: Any) -> Any:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_config(configs.small("roberta", num_labels=5)).train()
    ids = torch.randint(3, 100, (2, 16))
    return train(run, model, dict(input_ids=ids, labels=ids % 5))


@scenario("transformers/question_answering")
def run_questions(run: Any) -> Any:
    from transformers import AutoModelForQuestionAnswering

    model = AutoModelForQuestionAnswering.from_config(configs.small("bert")).train()
    ids, at = torch.randint(3, 100, (2, 16)), torch.tensor([2, 7])
    return train(run, model, dict(input_ids=ids, start_positions=at, end_positions=at + 3))
