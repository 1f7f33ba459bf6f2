"""A wheel: three packages with their data, which find a counter-example in an environment of what it requires alone."""

from __future__ import annotations

import re
import shlex
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.installed import PACKAGES, ROOT, run, unpacked
from tests.support.printed import unbroken

RING = """
import torch
import torch.distributed as dist
from verification.peers import Peer, claims

def nearest(case):
    case = claims.dense(claims.all_ranks(claims.without_own_settings(case)), causal=False)
    case = claims.in_dtypes(claims.even_shards(case, "contiguous"), "float32")
    return claims.forward_only(claims.equal_heads(claims.default_scale(claims.without_lse(case))))

def attend(q, k, v, case, group):
    out, rank, world = 0, group.rank(), group.size()
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    for _ in range(world):
        out = out + (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v / world  # should weigh blocks by log-sum-exp
        block, other = torch.stack([k, v]), torch.empty(2, *k.shape)
        send = dist.P2POp(dist.isend, block, (rank + 1) % world, group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, other, (rank - 1) % world, group)]):
            work.wait()
        k, v = other
    return out.transpose(1, 2)

adapter = Peer("my ring", "dense, fp32, even contiguous shards, forward", nearest, attend)
"""


def test_the_wheel_has_and_requires_three_packages(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {*PACKAGES}
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()]
    left_out = (".pyc", ".svg")  # pictures are those of a page
    assert names == {str(file.relative_to(ROOT)) for file in files if file.suffix not in left_out}
    plain = {x.name for x in map(Requirement, unpacked(wheel).requires or ()) if x.marker is None}
    assert plain == {"hypothesis", "numpy", "torch"}


@pytest.mark.ranks
def test_an_installed_copy_finds_and_replays_a_wrong_ring(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin/python"
    (tmp_path / "my_ring.py").write_text(RING)
    done = run(tmp_path, python, "-m", "verification", "peers", "my_ring:adapter", "--world", "2", "--seed", "1")
    said = unbroken(done.stdout)
    assert done.returncode == 1 and "counter-example: output and lse (wrong result, 2 ranks, gloo)" in said, done.stderr
    (line,) = re.findall(r"replay: (.*?\.json)", said)
    again = run(tmp_path, *shlex.split(line))
    assert again.returncode == 1 and "counter-example: output and lse" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize(
    "command, status, said",
    [
        ("ring-doctor", 0, "torch"),
        pytest.param("ring-verify mutants merge-by-sigmoid --limit 30", 0, "1 of 1 killed", marks=pytest.mark.slow),
        ("python -m ring.estimate --tokens 1Ki --ranks 2 --heads 2 --head-dim 64 --gpu H200", 2, "NVIDIA H200"),
        ("ring-validate", 2, "this runs under torchrun"),
        ("ring-verify faults --kind files", 2, "is now a test: in a clone run"),
        ("ring-verify peers deepspeed", 2, 'pip install "ring-dilated-attention[peers,training]"'),
        ("ring-verify model verification.models.trainers.trl_sft:Sft", 2, '"ring-dilated-attention[training]"'),
        ("python -c import~ring.integrations.transformers", 1, 'pip install "ring-dilated-attention[transformers]"'),
        ("python -c import~ring.integrations.trainers.trainer", 1, "needs accelerate, which is not installed: pip"),
        ("python -c import~ring.integrations.trainers.lightning", 1, "needs lightning, which is not installed: pip"),
        ("python -c import~ring.integrations.deepspeed", 1, 'pip install "ring-dilated-attention[training]"'),
        ("python -c import~ring.integrations.fairscale", 1, 'pip install "ring-dilated-attention[training]"'),
    ],
)
def test_commands_of_an_installed_copy(environment: Path, tmp_path: Path, command: str, status: int, said: str) -> None:
    program, *words = command.split()
    done = run(tmp_path, environment / "bin" / program, *(word.replace("~", " ") for word in words))
    printed = done.stdout + done.stderr
    assert done.returncode == status and said in printed, printed
