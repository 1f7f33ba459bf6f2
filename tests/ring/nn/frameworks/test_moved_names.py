"""Former names of the modules of ring.integrations."""

from importlib import import_module
from importlib.util import find_spec

import pytest

from ring.nn.frameworks import MOVED

OPTIONAL = {"lightning": "lightning", "trainer": "accelerate"} | {x: x for x in ("deepspeed", "fairscale")}


@pytest.mark.parametrize("old", MOVED)
def test_old_name_imports_the_new_module_and_says_its_name(old: str) -> None:
    if find_spec(OPTIONAL.get(old, "transformers" if "transformers" in old else "torch")) is None:
        pytest.skip("needs its framework")
    new = f"ring.integrations.{MOVED[old]}"
    with pytest.warns(DeprecationWarning, match=f"^ring.nn.frameworks.{old} is now {new}$") as warned:
        module = import_module(f"ring.nn.frameworks.{old}")
    assert module is import_module(new) and module.__name__ == new
    assert len(warned) == 1
