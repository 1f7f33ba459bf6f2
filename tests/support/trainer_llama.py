"""A Llama of random weights in transformers' Trainer; the lines behind `# was:` are those of one process."""

import gc
import sys
from typing import Any

import torch
from accelerate import PartialState
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, TrainingArguments

from ring.integrations.trainers.trainer import ContextParallelTrainer  # was: from transformers import Trainer

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    rows = [torch.randint(64, (20 + 7 * i,)).tolist() for i in range(16)]
    data: dict[str, Any] = {"train_dataset": [{"input_ids": row, "labels": row} for row in rows]}
    data |= {"eval_dataset": data["train_dataset"], "data_collator": DataCollatorWithFlattening()}
    args = TrainingArguments("llama", use_cpu=True, max_steps=3, logging_steps=1, gradient_accumulation_steps=2)
    trainer = ContextParallelTrainer(model, args, **data, context_size=4)  # was: trainer = Trainer(model, args, **data)
    trainer.train()
    *steps, _ = trainer.state.log_history
    numbers = [step[key] for step in steps for key in ("loss", "grad_norm")] + [trainer.evaluate()["eval_loss"]]
    sys.stdout.write(f"rank {args.process_index}: {' '.join(f'{x:.5f}' for x in numbers)}\n")


main()
gc.collect()  # ends the groups of the model, whose threads would need Python while it ends
PartialState().destroy_process_group()
