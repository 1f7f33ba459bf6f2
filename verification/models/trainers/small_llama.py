"""A small Llama of transformers, as the user of a trainer gives it."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


def small_llama() -> LlamaForCausalLM:
    """Build the model, with its own attention."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
