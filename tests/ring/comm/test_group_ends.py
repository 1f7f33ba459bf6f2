"""A group that is destroyed ends, and gloo's threads with it: one that still runs while Python ends can abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys, weakref
import torch
import torch.distributed as dist
from ring import Layout, Pattern, ring_attention
torch.ones(1, requires_grad=True).backward()  # for whose threads, one for each GPU, no group is responsible
threads = len(os.listdir("/proc/self/task"))
store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
q, k, v = torch.randn(3, 1, 8, 2, 4).requires_grad_()
ring_attention(q, k, v, Pattern.dense(), Layout.contiguous(8, 1), group=dist.group.WORLD).sum().backward()
assert len(os.listdir("/proc/self/task")) > threads
dist.destroy_process_group()
print(group(), len(os.listdir("/proc/self/task")) - threads)
"""


def test_a_destroyed_group_ends_after_attention(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "None 0\n", done.stderr
