"""Records of torch's flight recorder: the last collectives of each rank, and torch's own analysis of those of all.

Import torch inside the functions only: ranks get it from the forkserver's preload, and check that.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

KEPT = 2000  # collectives that a rank remembers
ANALYSIS_TIMEOUT = 60.0  # seconds; torch's import is most of it
MAX_LINES = 40
_NOISE = "tabulate is not installed"


def enable() -> None:
    """Have groups that are created from now on record their collectives, as NCCL's do anyway."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def serve(questions: Connection) -> None:
    """Answer each message with this rank's record, until the other end is closed. For a thread of its own."""
    while True:
        try:
            questions.recv_bytes()
            questions.send_bytes(record())
        except (EOFError, OSError):
            return


def record() -> bytes:
    """Return this rank's record, pickled, with the members of its groups, which that of gloo lacks."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    on_nccl = "nccl" in dist.get_backend_config()
    dump = _distributed_c10d._dump_nccl_trace if on_nccl else _distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    record = pickle.loads(dump())
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():  # groups of which this rank is a member
        ranks = str(sorted(world.pg_group_ranks[group]))
        record["pg_config"].setdefault(name, {"name": name, "desc": group.group_desc, "ranks": ranks})
    return pickle.dumps(record)


def analysis(records: Mapping[int, bytes]) -> str:
    """Return what torch's analyser says of the ranks' records: the first collective that not all ranks joined."""
    if not records:
        return "no rank gave its flight record"
    with TemporaryDirectory() as folder:
        for rank, pickled in records.items():
            Path(folder, f"rank_{rank}").write_bytes(pickled)
        words = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-p", "rank_"]
        words.append("--allow-incomplete-ranks")
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=ANALYSIS_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"torch's analysis of the flight records took longer than {ANALYSIS_TIMEOUT:.0f} s"
    text = done.stdout + done.stderr
    # Each line once: of a hang the analyser says the same for every operation that was posted.
    lines = [line for line in dict.fromkeys(text.splitlines()) if line.strip() and not line.startswith(_NOISE)]
    if done.returncode:
        return f"torch could not analyse the flight records: {lines[-1] if lines else ''}"
    return "\n".join(["torch's analysis of the flight records:", *(lines or ["nothing"])[:MAX_LINES]])
