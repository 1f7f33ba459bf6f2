"""A Llama of random weights that one process trains for three steps. llama_sharded.py is the same on ranks."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(19, (2, 24))
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"{loss.item()}\n")


main()
