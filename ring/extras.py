"""Extras of the distribution: which one brings a package that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "ring-dilated-attention"
EXTRAS = {  # a package, by its name in an import, and the smallest extra of pyproject.toml that has it
    "transformers": "transformers",
    **dict.fromkeys(("accelerate", "deepspeed", "fairscale", "lightning", "peft", "trl", "datasets"), "training"),
    **dict.fromkeys(("ring_attention_pytorch", "ring_flash_attn", "yunchang", "einops"), "peers"),
    **dict.fromkeys(("jupyterlab", "jupytext", "nbmake", "matplotlib", "scipy", "IPython"), "notebooks"),
    "flash_attn": "fa4",
    "jax": "jax",
}


def how_to_install(package: str | None) -> str:
    """Return what an error about a missing package ends with: its command, "" for a package that no extra has."""
    return f': pip install "{DISTRIBUTION}[{EXTRAS[package]}]"' if package in EXTRAS else ""


@contextmanager
def optional_imports(purpose: str) -> Iterator[None]:
    """Say in one line which package an import lacks, and how to install it. Raises ModuleNotFoundError of that name."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise  # a package of theirs, or a module that an installed version lacks
        text = f"{purpose} needs {error.name}, which is not installed{how_to_install(error.name)}"
        raise ModuleNotFoundError(text, name=error.name) from None
