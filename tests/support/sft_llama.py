"""A Llama of random weights in TRL's SFTTrainer, packed; the lines behind `# was:` are those of one process."""

import gc
import sys

import torch
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer  # was:

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Sharded(ContextParallelTrainer, SFTTrainer): ...  # type: ignore[misc]  # was:


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    documents = Dataset.from_list([{"input_ids": torch.randint(64, (20 + 7 * i,)).tolist()} for i in range(16)])
    data = {"train_dataset": documents, "processing_class": tokenizer}
    args = SFTConfig("llama", use_cpu=True, bf16=False, max_steps=3, logging_steps=1, packing=True, max_length=128)
    trainer = Sharded(model, args, **data, context_size=4)  # was: trainer = SFTTrainer(model, args, **data)
    trainer.train()
    *steps, _ = trainer.state.log_history
    numbers = [step[key] for step in steps for key in ("loss", "grad_norm", "entropy")]
    sys.stdout.write(f"rank {args.process_index}: {' '.join(f'{x:.5f}' for x in numbers)}\n")


main()
gc.collect()  # ends the groups of the model, whose threads would need Python while it ends
PartialState().destroy_process_group()
