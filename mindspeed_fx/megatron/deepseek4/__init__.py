"""DeepSeek-V4's layers in Megatron's models (``--spec mindspeed_llm...deepseek4_spec``; DeepSeek-AI 2026, as
MindSpeed-LLM's deepseek4_spec.py and transformers' deepseek_v4 have them).

A token has several residual streams (``streams``, manifold-constrained hyper-connections); attention sees a window of
tokens and pooled entries of all earlier ones (``compressor``), of which in some layers an ``indexer`` chooses;
``attention`` has one head of keys, which are the values too, and a projection of its output in groups; ``layer`` is a
layer, ``model`` puts the parts on a GPTModel. Its router is :mod:`mindspeed_fx.megatron.square_root_router`.
"""
