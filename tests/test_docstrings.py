"""Public docstrings in one form: a sentence, then `Args:`, `Returns:`, `Raises:`.

`Args:` names every parameter and nothing else; a class names those of its constructor. `Returns:` is required of
functions and methods that return a value, unless the sentence itself begins with "Return". Class methods, which return
the class, properties and special methods need none; `extra_repr` is torch's.
"""

import inspect
import os
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks at it once, when it is imported

import pytest

PACKAGES = (  # public: the names in __all__
    "reference", "ring", "ring.estimate", "ring.nn", "verification.models", "verification.peers",
    "verification.testing",
)  # fmt: skip
MODULES = (  # public: every class and function without an underscore
    "reference.call_limits", "reference.closed_forms", "reference.cost", "reference.oracle", "reference.shards",
    "ring.integrations.wrappers.ddp", "ring.integrations.deepspeed",
    "ring.integrations.fairscale", "ring.integrations.wrappers.fsdp", "ring.integrations.trainers.lightning",
    "ring.integrations.wrappers.mesh", "ring.integrations.parallel_style", "ring.integrations.wrappers.recompute",
    "ring.integrations.trainers.trainer", "ring.integrations.transformers",
    "verification.peers.claims",
)  # fmt: skip
OPTIONAL = {  # the package that a module needs
    "deepspeed": "deepspeed", "fairscale": "fairscale", "lightning": "lightning", "trainer": "accelerate",
    "transformers": "transformers",
}  # fmt: skip
PROPERTIES = (property, cached_property)


def _public() -> Iterator[tuple[str, Any]]:
    """Yield public classes and functions by name, and the methods and properties of these classes."""
    for name in (*PACKAGES, *MODULES):
        package = OPTIONAL.get(name.rpartition(".")[2])
        if package is not None and find_spec(package) is None:
            continue  # an optional extra, which scripts/test installs
        module = import_module(name)
        for key in getattr(module, "__all__", vars(module)):
            x = getattr(module, key)
            own = name in PACKAGES or getattr(x, "__module__", "") == name
            if own and not key.startswith("_") and (inspect.isclass(x) or inspect.isfunction(x)):
                yield f"{name}.{key}", x
                for base in inspect.getmro(x) if inspect.isclass(x) else ():
                    if base.__module__.startswith(("reference", "ring", "verification")):
                        yield from ((f"{name}.{key}.{member}", y) for member, y in _members(base))


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    for name, x in vars(cls).items():
        is_method = inspect.isfunction(x) and name not in (*getattr(cls, "__dataclass_fields__", ()), "extra_repr")
        if not name.startswith("_") and (is_method or isinstance(x, (classmethod, *PROPERTIES))):
            yield name, x


def _parameters(x: Any) -> set[str]:
    """Names of the parameters that a caller may give."""
    if isinstance(x, PROPERTIES) or (inspect.isclass(x) and (issubclass(x, Exception) or hasattr(x, "_is_protocol"))):
        return set()
    parameters = inspect.signature(getattr(x, "__func__", x)).parameters.values()
    return {p.name for p in parameters if p.name not in ("self", "cls") and p.annotation != "Never"}


@pytest.mark.parametrize("x", [pytest.param(x, id=name) for name, x in _public()])
def test_docstring_names_parameters_and_result(x: Any) -> None:
    assert x.__doc__, "a docstring is missing"
    sentence, *parts = re.split(r"^(Args|Returns|Raises):$", inspect.cleandoc(x.__doc__), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    entries = re.findall(r"^    (\w[\w, ]*):", sections.get("Args", ""), flags=re.MULTILINE)
    assert {name for entry in entries for name in entry.split(", ")} == _parameters(x)
    if inspect.isfunction(x) and inspect.signature(x).return_annotation not in (None, "None", "NoReturn"):
        assert sections.get("Returns", "").strip() or sentence.startswith("Return "), "the result is missing"
