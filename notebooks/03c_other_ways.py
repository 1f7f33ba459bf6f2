# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Efficiency, compared with other ways to share a sequence
#
# Efficiency is the time that one GPU takes for the whole sequence, divided by the number of GPUs and by the time that
# the GPUs take together. The figure shows dense causal attention in bf16, forward and backward. Of every method it
# shows the faster of two calls, captured in a CUDA graph or not, on the faster of cuDNN and FlashAttention-4;
# the ring without a graph stands beside it, since there the host limits how fast a short call is.

# %%
import matplotlib.pyplot as plt
from figures import binary, efficiency_bars, recorded_rows, style

style()

# %%
BESIDE = "h200x2_dense"
chosen = [
    row for row in recorded_rows(section="dense")
    if row["record"] == BESIDE and row["pass"] == "forward+backward" and row.get("efficiency") is not None
]  # fmt: skip
methods = {
    "ring_attention": [row for row in chosen if row["method"] == "ring_attention"],
    "ring_attention, no CUDA graph": [r for r in chosen if r["method"] == "ring_attention" and not r["graph"]],
    "all-to-all (Ulysses)": [row for row in chosen if row["method"].startswith("all-to-all")],
    "ring-flash-attn, zigzag": [row for row in chosen if row["method"] == "ring-flash-attn zigzag"],
    "torch context_parallel": [row for row in chosen if row["method"].startswith("torch context_parallel")],
}
efficiency = {
    method: {tokens: max(row["efficiency"] for row in rows if row["tokens"] == tokens) for tokens in (512, 2048, 8192)}
    for method, rows in methods.items()
}
figure, axes = plt.subplots(figsize=(7.2, 3.2))
efficiency_bars(axes, efficiency, title="Dense causal attention, forward + backward, on 2 H200s")
for method, values in efficiency.items():
    print(f"{method:>30}", "  ".join(f"{binary(tokens)}: {value:.2f}" for tokens, value in values.items()))
ours = efficiency["ring_attention"]
assert all(ours[tokens] >= values[tokens] for values in efficiency.values() for tokens in ours)
