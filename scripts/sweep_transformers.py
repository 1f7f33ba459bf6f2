#!/usr/bin/env python3
"""Trains a tiny model of every architecture of transformers on two ranks, and writes what came out into a page.

scripts/sweep_transformers.py [ARCHITECTURE ...] [--write]

Each head of each text architecture is built from a tiny configuration in fp64. `prepare` takes or refuses it. If it
takes it, two gloo ranks compute outputs, and gradients of a loss of tokens, of zigzag shards and of packed documents.
These are compared with one process. The verdict is "right", "refused", "not built", or "WRONG" if `prepare` took a
model that differs. The comparison in `prepare` has no part in the verdict. Exit status: 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ring import Layout
from ring.nn import ContextParallel
from verification import whole_file
from verification.failures import RankFailure
from verification.run.processes.pool import Pool

PAGE = Path(__file__).parents[1] / "ring" / "integrations" / "ARCHITECTURES.md"
TOKENS, DOCUMENTS = 20, (7, 1, 12)
LIMIT = 1e-9  # of the greatest magnitude: rounding in fp64 is 1e-13
PARAMETERS = 5_000_000  # of a tiny model, at most
HEADS = {
    "base": "MODEL_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
RIGHT, REFUSED, NOT_BUILT, WRONG = "right", "refused", "not built", "WRONG"
TINY: dict[int, str] = {
    64: "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions max_sequence_length n_ctx",
    32: "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim model_dim hidden_dim lru_width",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim feed_forward_proj_dim ffn_hidden_size "
    "shared_expert_intermediate_size d_inner mlp_dim block_ff_dim",
    16: "mamba_d_head mamba_head_dim moe_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim "
    "expert_ffn_hidden_size moe_shared_expert_intermediate_size mamba_d_state state_size hidden_size_per_layer_input",
    8: "head_dim rotary_dim qk_rope_head_dim d_kv sliding_window attention_window "
    "linear_key_head_dim linear_value_head_dim index_head_dim attention_chunk_size floor_scale "
    "global_head_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts mamba_n_heads mamba_num_heads linear_num_value_heads index_n_heads "
    "moe_num_experts num_global_query_heads time_step_rank num_value_heads",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads n_groups "
    "num_experts_per_tok moe_topk moe_k n_group topk_group num_experts_per_token linear_num_key_heads mamba_n_groups "
    "num_kv_heads multi_query_group_num num_hash_layers num_nextn_predict_layers num_global_key_value_heads "
    "no_rope_layer_interval",
    1: "first_k_dense_replace n_shared_experts num_shared_experts",
}
MISSING = (
    "vocab_size",
    "head_dim",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
)  # None, and then needed
SIZES = {name: size for size, names in TINY.items() for name in names.split()}


class Verdict(NamedTuple):
    """kind: "right", "refused", "not built" or "WRONG". reason: why."""

    kind: str
    reason: str


def candidates(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (architecture, head, class) for text models: all, or those of these architectures."""
    from transformers.models.auto import modeling_auto

    mappings = {head: getattr(modeling_auto, name) for head, name in HEADS.items()}
    text = {architecture for head, kinds in mappings.items() if head != "base" for architecture in kinds}
    for head, mapping in mappings.items():
        for architecture, kinds in mapping.items():
            if architecture in (names or text):
                yield architecture, head, kinds if isinstance(kinds, str) else kinds[0]


def tiny(kind: Any) -> Any:
    """Return a small configuration of a class, with each kind of layer once."""
    default = kind()
    changes: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if is_computed(kind, name):
            continue
        if value is None and name in MISSING:
            changes[name] = SIZES[name]
        elif name in SIZES and type(value) is int and value > 0:
            changes[name] = min(value, SIZES[name])
        elif isinstance(value, float) and "drop" in name:
            changes[name] = 0.0
        elif name in kind.sub_configs and getattr(default, name) is not None:
            changes[name] = tiny(type(getattr(default, name))).to_dict()
    if "kv_lora_rank" in changes:  # latent attention: every head has keys of its own
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    if "mamba_d_ssm" in default.to_dict():
        changes["mamba_d_ssm"] = changes["mamba_d_head"] * changes["mamba_n_heads"]
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        value = getattr(default, name, None)
        if isinstance(value, list) and value and not is_computed(kind, name):
            kinds = [*dict.fromkeys(value)]
            changes[name] = kinds if len(kinds) > 1 else kinds * 2
    lengths = [len(x) for name, x in changes.items() if isinstance(x, list)]
    if lengths:
        count = max(lengths)
        changes |= {name: (x * count)[:count] for name, x in changes.items() if isinstance(x, list)}
        changes |= {name: count for name in ("num_hidden_layers", "n_layer") if name in changes}
    if hasattr(default, "attention_types"):  # of GPT-Neo: kinds of layers, and how often
        changes["attention_types"] = [[default.attention_types[0][0], 1]]
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 3}
    return kind(**changes, **special)


def is_computed(kind: Any, name: str) -> bool:
    return isinstance(getattr(kind, kind.attribute_map.get(name, name), None), property)


def build(architecture: str, kind: str) -> nn.Module:
    """Return a tiny model in fp64 whose parameters are all drawn, or raise."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = tiny(transformers.CONFIG_MAPPING[architecture])
    cls = getattr(transformers, kind)
    with torch.device("meta"):
        size = sum(x.numel() for x in cls(config).parameters())
    if size > PARAMETERS:
        raise ValueError(f"{size} parameters")
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part._attn_implementation_internal = part._experts_implementation_internal = "eager"
    torch.manual_seed(0)
    model: nn.Module = cls(config).double().eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, dtype=x.dtype), alpha=0.05)
    return model


def tensors(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in a model's output, by name."""
    if isinstance(x, Tensor) and x.is_floating_point():
        yield name, x
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(x, list | tuple):
        for key, value in enumerate(x):
            yield from tensors(value, f"{name}.{key}")


def weight(name: str, shape: torch.Size) -> Tensor:
    """Weights of the loss, of a whole output."""
    draw = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, dtype=torch.float64, generator=draw)


class Double(TorchFunctionMode):
    """Replaces conversions to fp32, as in norms, by those to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **{k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()})


class Whole(NamedTuple):
    """Outputs by name, along all tokens, and gradients by name, in one process. others: outputs without tokens."""

    outputs: dict[str, Tensor]
    others: dict[str, Tensor]
    grads: dict[str, Tensor]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Take the gradients off a model."""
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def run_whole(model: nn.Module, ids: Tensor, documents: tuple[int, ...]) -> Whole:
    """Run each document by itself in one process."""
    parts = [dict(tensors(model(input_ids=part, use_cache=False))) for part in ids.split(documents, 1)]
    along = [
        name for name in parts[0]
        if all(x[name].dim() > 1 and x[name].shape[1] == n for x, n in zip(parts, documents, strict=True))
    ]  # fmt: skip
    outputs = {name: torch.cat([part[name] for part in parts], 1) for name in along}
    loss = sum(((x * weight(name, x.shape)).sum() for name, x in outputs.items()), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    others = {name: x.detach() for name, x in parts[0].items() if name not in along} if len(documents) == 1 else {}
    return Whole({name: x.detach() for name, x in outputs.items()}, others, gradients(model))


def compare_shards(model: nn.Module, ids: Tensor, whole: Whole, documents: tuple[int, ...] | None) -> str:
    """Run this rank's shard of a prepared model. Returns what differs, or nothing."""
    context = ContextParallel(Layout.zigzag(TOKENS, dist.get_world_size()), documents=documents)
    out = model(context.shard(ids), position_ids=context.positions[None], context=context, use_cache=False)
    parts = dict(tensors(out))
    loss = torch.zeros((), dtype=torch.float64)
    wrong = []
    for name, x in whole.outputs.items():
        if parts[name].shape != context.shard(x).shape or not near(parts[name].detach(), context.shard(x), x):
            wrong.append(f"output {name}")
        else:
            loss = loss + (parts[name] * context.shard(weight(name, x.shape))).sum()
    wrong += [f"output {name}" for name, x in whole.others.items() if name in parts and not near(parts[name], x, x)]
    if loss.requires_grad:
        loss.backward()
    grads = gradients(model)
    largest = max((float(x.abs().max()) for x in whole.grads.values()), default=0.0)
    for name, parameter in model.named_parameters():
        total = grads.get(name, torch.zeros_like(parameter))
        dist.all_reduce(total)
        exact = whole.grads.get(name, torch.zeros_like(parameter))
        if not bool(((total - exact).abs() <= LIMIT * largest).all()):
            wrong.append(f"gradient of {name}")
    return ", ".join(wrong[:3])


def near(x: Tensor, exact: Tensor, whole: Tensor) -> bool:
    if x.shape != exact.shape:
        return False
    largest = float(whole[whole.isfinite()].abs().max()) if whole.numel() else 0.0
    return bool(((x == exact) | ((x - exact).abs() <= LIMIT * largest)).all())


def judge(architecture: str, kind: str) -> Verdict:
    """Task of a rank: return the verdict on a class."""
    from ring.integrations.transformers import prepare

    try:
        model: Any = build(architecture, kind)
        named = {x for x in model.config.get_text_config().to_dict().values() if type(x) is int}
        tokens = torch.tensor([x for x in range(model.config.get_text_config().vocab_size) if x not in named])
        ids = tokens[torch.randint(len(tokens), (1, TOKENS), generator=torch.Generator().manual_seed(3))]
    except Exception as error:
        return Verdict(NOT_BUILT, told(error))
    alone = copy.deepcopy(model)
    try:
        prepare(model, dist.group.WORLD)
    except (ValueError, NotImplementedError) as error:
        return Verdict(NOT_BUILT if "in one process to be compared" in str(error) else REFUSED, str(error))
    try:
        with Double():
            whole = [run_whole(alone, ids, documents) for documents in ((TOKENS,), DOCUMENTS)]
            wrong = [compare_shards(model, ids, x, d) for x, d in zip(whole, (None, DOCUMENTS), strict=True)]
    except Exception as error:
        return Verdict(WRONG, f"prepared, then {told(error)}")
    if wrong[0] or wrong[1]:
        return Verdict(WRONG, wrong[0] or f"with documents {wrong[1]}")
    return Verdict(RIGHT, "") if whole[0].outputs else Verdict(WRONG, "no outputs of tokens")


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def joint(verdicts: list[Verdict]) -> Verdict:
    """One verdict of all ranks: the wrong one if there is one; different ones are wrong."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    wrong = [f"rank {rank}: {x.kind} {x.reason}" for rank, x in enumerate(verdicts)]
    return Verdict(WRONG, "; ".join(wrong))


def sweep(pool: Pool, names: list[str]) -> dict[tuple[str, str], Verdict]:
    """Judge all heads of architectures."""
    verdicts = {}
    for architecture, head, kind in sorted(candidates(names)):
        try:
            verdict = joint(pool.run(judge, architecture, kind))
        except RankFailure as failure:
            verdict = Verdict(WRONG, told(failure))
        verdicts[architecture, head] = verdict
        print(f"{architecture} {head} ({kind}): {verdict.kind} {verdict.reason}", flush=True)
    return verdicts


def cause(reason: str) -> str:
    """The module that a refusal names, or its argument."""
    module = re.search(r"(?:the output(?: \S+)? of|, got \w+: .* in) (?:\S+|the model itself) \((\w+)\)", reason)
    if module:
        return f"`{module[1]}`"
    text = re.sub(r"^rank \d+: ", "", reason)
    if "registry can replace" in text:
        return "an attention of its own"
    if "hand its keywords to the attention" in text:
        return "an error in its forward"
    return "encoder and decoder" if "an encoder or a decoder" in text else f"`{text.partition(' must')[0]}`"


def page(verdicts: dict[tuple[str, str], Verdict]) -> str:
    """Return the page: a line for each architecture, of which some head is built."""
    rows: dict[str, dict[str, list[str]]] = {}
    for (architecture, head), verdict in sorted(verdicts.items()):
        key = cause(verdict.reason) if verdict.kind == REFUSED else verdict.kind
        rows.setdefault(architecture, {}).setdefault(key, []).append(head)
    lines, unbuilt = [], []
    for architecture, kinds in rows.items():
        kinds.pop(NOT_BUILT, None)
        right = ", ".join(kinds.pop(RIGHT, []))
        refused = "; ".join(f"{', '.join(heads)}: {key}" for key, heads in kinds.items())
        if right or refused:
            lines.append(f"| {architecture} | {right} | {refused} |")
        else:
            unbuilt.append(architecture)
    right_ones = sum(any(v.kind == RIGHT for (x, _), v in verdicts.items() if x == name) for name in rows)
    counts = Counter(verdict.kind for verdict in verdicts.values())
    return TEXT.format(
        version=version("transformers"), torch=version("torch"), architectures=len(rows), right_ones=right_ones,
        right=counts[RIGHT], refused=counts[REFUSED], wrong=counts[WRONG], not_built=counts[NOT_BUILT],
        unbuilt=", ".join(unbuilt), table="\n".join(lines),
    )  # fmt: skip


TEXT = """# Architectures of transformers

Written by `scripts/sweep_transformers.py --write`, of transformers {version} and torch {torch}. Each head of each text
architecture is built tiny, with drawn weights, and prepared on two ranks. "Right": outputs and gradients of zigzag
shards, and of packed documents, are those of one process in fp64. "Refused": `prepare` raises an error that names this
module or argument.

{architectures} architectures, {right_ones} of them right with some head. Heads: {right} right, {refused} refused,
{wrong} wrong, {not_built} not built.

| architecture | right | refused, by |
|---|---|---|
{table}

Not built, since a generic tiny configuration does not fit: {unbuilt}.
"""


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="model types, as llama; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.write and arguments.architectures:
        parser.error("--write is for all architectures: name none")
    with Pool(2, preload=("torch", "torch._dynamo", "ring.nn"), timeout=60.0) as pool:
        verdicts = sweep(pool, arguments.architectures)
    print(Counter(x.kind for x in verdicts.values()))
    if arguments.write:
        whole_file.write(PAGE, page(verdicts))
    return int(any(x.kind == WRONG for x in verdicts.values()))


if __name__ == "__main__":
    sys.modules["sweep_transformers"] = sys.modules["__main__"]
    judge.__module__ = "sweep_transformers"
    sys.exit(main())
