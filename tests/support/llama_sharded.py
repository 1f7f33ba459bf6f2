"""A Llama of random weights that ranks train for three steps. llama_alone.py is the same in one process."""

import gc
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ring import Layout
from ring.integrations import transformers
from ring.integrations.wrappers import ddp
from ring.nn import ContextParallel, cross_entropy, next_tokens, shard_batch

SIZES = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    context = ContextParallel(Layout.zigzag(24, 2), mesh["context"])
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = ddp.wrap(transformers.prepare(model, mesh["context"]), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(19, (2, 24))
    for _ in range(3):
        batch = shard_batch(context, tokens, next_tokens(tokens))
        logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
        loss = cross_entropy(logits, batch.labels, mesh)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"{loss.item()}\n")


main()
gc.collect()  # ends the groups of the model, whose threads would need Python while it ends
torch.distributed.destroy_process_group()
