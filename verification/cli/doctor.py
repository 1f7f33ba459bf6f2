"""What this machine has and will do. Nothing is judged: what is slow or unusual here is for the reader to see, what is
wrong for `scripts/validate_nccl.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from reference import Pattern, validators
from ring import Layout, count_kernels, ring_attention
from ring.comm.transport import SoloTransport
from ring.plan.plan import EXCHANGES
from verification.case import DTYPES
from verification.cli.arguments import add_json, check_outputs, command, console, typed, write_json
from verification.report.text import paragraph

COMMAND = command("verification.cli.doctor", "ring-doctor")
HELP = "print what this machine has, and what each setting means here"
ABOUT = """\
Prints what this machine has and will do: GPUs, links, versions, settings in
force, what carries each exchange, and which kernels are picked. It judges
nothing; a GPU is not needed."""
STATUS = "exit status: 0 it is printed; 2 it could not be found out."
DIM, TOKENS = 64, 64  # of the tiles for which kernels are picked
# Settings of these are shown, and where nothing more is known of one, whose it is.
OWNERS = {
    "NCCL_": "NCCL", "TORCH_NCCL_": "torch's use of NCCL", "TORCH_SYMM_MEM_": "torch's symmetric memory",
    "TORCH_": "torch", "TORCHELASTIC_": "torchrun", "PYTORCH_": "torch", "CUDA_": "CUDA", "GLOO_": "gloo",
    "OMP_": "OpenMP, by which torch runs threads on the CPU", "TRITON_": "Triton, which compiles the fused merge",
}  # fmt: skip
# By name; "*" stands for anything. The longest that fits counts.
MEANINGS = {
    "OMP_NUM_THREADS": "threads of one rank on the CPU: more than cores / ranks makes ranks wait for each other",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo: ranks on several machines need one that all can reach",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are, in which order; torchrun's local rank i takes the i-th of these",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues: with 1, an exchange posted after a kernel does not overtake it",
    "CUDA_LAUNCH_BLOCKING": "with 1, every kernel is waited for: nothing overlaps, so no timing here means anything",
    "CUDA_MODULE_LOADING": "LAZY loads kernels at first use: first calls are slow, and must not be timed",
    "NCCL_DEBUG*": "what NCCL logs; INFO and TRACE slow start-up and fill the log, nothing else changes",
    "NCCL_NVLS_ENABLE": "0: no NVLink SHARP (multicast) in collectives; only `gather` may use it",
    "NCCL_P2P_*": "direct copies between GPUs: without them every hop goes through host memory, many times slower",
    "NCCL_SHM_DISABLE": "1: no shared memory within a host: ranks without direct copies go over the network",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE: hops between hosts go over TCP, many times slower",
    "NCCL_IB_*": "how NCCL uses InfiniBand or RoCE between hosts; within one host it does not matter",
    "NCCL_SOCKET_IFNAME": "the network interface of NCCL's bootstrap, and of its traffic where there is no InfiniBand",
    "NCCL_PROTO": "forces NCCL's protocol: LL and LL128 lower latency, Simple reaches the full bandwidth",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffer per channel: memory on the GPU that `reference/cost.py` does not count",
    "NCCL_NCHANNELS_PER_PEER": "channels of a point-to-point exchange: each takes an SM from attention while it copies",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what torch does when NCCL fails or times out; with 0 the ranks wait for ever",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks the host until the exchange is done, so nothing overlaps",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "torch ends a process after such a silence; a --timeout should be less",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: no NVLink multicast, which copies from one GPU to another do not need",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective across ranks: slow, for finding mismatches only",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: fp32 products in TF32, 10 bits: errors exceed the bounds",
    "PYTORCH_*ALLOC_CONF": "how torch takes GPU memory: expandable_segments lets longer sequences fit",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1: every tensor is a cudaMalloc, which waits for the GPU: no timing counts",
}


def meaning(name: str) -> str:
    """What a setting of one of OWNERS means here. Raises ValueError for any other."""
    fits = [pattern for pattern in MEANINGS if fnmatchcase(name, pattern)]
    if fits:
        return MEANINGS[max(fits, key=len)]
    owner = OWNERS[max((prefix for prefix in OWNERS if name.startswith(prefix)), key=len)]
    return f"a setting of {owner}; see its documentation"


def in_force(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The settings of OWNERS that are set, by name, with their values and what they mean here."""
    names = sorted(name for name in environment if name.startswith(tuple(OWNERS)))
    return [{"name": name, "value": environment[name], "meaning": meaning(name)} for name in names]


def topology() -> str:
    """The links between GPUs as `nvidia-smi topo -m` has them, or why they are not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not known: there is no nvidia-smi"
    try:
        said = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: nvidia-smi topo -m: {error}"
    if said.returncode:
        return f"not known: nvidia-smi topo -m ended with {said.returncode}: {(said.stderr or said.stdout).strip()}"
    return said.stdout.rstrip()


def versions() -> dict[str, str]:
    """By name; "none" for what is not there."""
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    found = {
        "python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "cuDNN": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "triton": next((x.version for x in metadata.distributions(name="triton")), None),
    }  # fmt: skip
    return {name: str(version or "none") for name, version in found.items()}


def gloo_interface(environment: Mapping[str, str]) -> str:
    """Over which interface gloo goes here."""
    if not dist.is_gloo_available():
        return "this torch has no gloo"
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    names = [name for _, name in socket.if_nameindex()]
    if chosen is None:
        return f"by the host's name, {socket.gethostname()} (there are {', '.join(names)}); within `verification`: lo"
    missing = [name for name in chosen.split(",") if name not in names]
    return f"{chosen}, of which {', '.join(missing)} is not there: gloo will fail" if missing else chosen


def exchange_road(exchange: str, device: str) -> str:
    """What carries an exchange's keys and values between ranks with tensors on that type of device."""
    validators.choice("exchange", exchange, EXCHANGES)
    if device == "cpu":
        return "gloo, point to point" if dist.is_gloo_available() else "none: this torch has no gloo"
    if not torch.cuda.is_available():
        return "none: there is no GPU"
    if not dist.is_nccl_available():
        return "none: this torch has no NCCL"
    return "copies out of symmetric memory where the ranks' GPUs are of one host and reach each other, else NCCL"


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def kernel_choices() -> list[dict[str, str]]:
    """Which kernel `auto` picks for a tile (`what`, in words), by device and dtype: seen while ring_attention runs,
    forward and backward."""
    whole = Layout.contiguous(TOKENS, 1)
    shuffled = Layout.from_cuts(torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)), [0, TOKENS])
    tiles = [
        ("full", Pattern.dense(False), whole, False),
        ("causal", Pattern.dense(True), whole, False),
        ("by position", Pattern.dense(True), shuffled, False),
        ("full, gradient through lse", Pattern.dense(False), whole, True),
    ]
    return [
        {
            "device": device, "dtype": dtype, "what": what,
            "kernel": _picked(torch.device(device), DTYPES[dtype], pattern, layout, through_lse),
        }
        for device in devices()
        for dtype in DTYPES
        for what, pattern, layout, through_lse in tiles
    ]  # fmt: skip


def _picked(device: torch.device, dtype: torch.dtype, pattern: Pattern, layout: Layout, through_lse: bool) -> str:
    """The kernels of forward and backward, by name; one name if they are the same."""
    q, k, v = (torch.ones(1, TOKENS, 2, DIM, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    with count_kernels() as forward:
        result = ring_attention(q, k, v, pattern, layout, group=SoloTransport(), kernel="auto", return_lse=through_lse)
    with count_kernels() as backward:
        (result[1] if isinstance(result, tuple) else result).sum().backward()
    there, back = ("+".join(sorted(names)) or "not seen" for names in (forward, backward))
    return there if there == back else f"{there}, backward {back}"


def examine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything, as JSON has it. memory: bytes; peer_access: in row i, column j, whether GPU i can read GPU j's."""
    count = range(torch.cuda.device_count())
    gpus = [torch.cuda.get_device_properties(index) for index in count]
    return {
        "gpus": [{"name": x.name, "memory": x.total_memory, "capability": f"{x.major}.{x.minor}"} for x in gpus],
        "peer_access": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in count] for i in count],
        "topology": topology(), "versions": versions(), "gloo_interface": gloo_interface(environment),
        "settings": in_force(environment),
        "exchanges": {name: {device: exchange_road(name, device) for device in devices()} for name in EXCHANGES},
        "kernels": kernel_choices(),
    }  # fmt: skip


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What `examine` found, for people: lines of 80 columns, but for what nvidia-smi says."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield from paragraph(f"versions: {versions}", hanging="  ")
    yield f"GPUs: {len(found['gpus'])}" if found["gpus"] else "GPUs: none; everything runs on the CPU, joined by gloo"
    for index, gpu in enumerate(found["gpus"]):
        yield f"  {index}: {gpu['name']}, {gpu['memory'] / 2**30:.1f} GiB, compute capability {gpu['capability']}"
    if len(found["gpus"]) > 1:
        yield "peer access (row reads column):"
        for index, row in enumerate(found["peer_access"]):
            yield f"  {index}: " + " ".join("yes" if there else "NO " for there in row)
    if found["gpus"]:
        yield "links (nvidia-smi topo -m):"
        yield from ("  " + line for line in found["topology"].splitlines())
    yield from paragraph(f"gloo's interface: {found['gloo_interface']}", hanging="  ")
    yield "settings in force:" if found["settings"] else "settings in force: none, everything is by default"
    for setting in found["settings"]:
        yield f"  {setting['name']}={setting['value']}"
        yield from paragraph(setting["meaning"], "      ")
    yield "exchanges:"
    roads = {name: tuple(f"{device}: {road}" for device, road in x.items()) for name, x in found["exchanges"].items()}
    for names, words in _together(roads):
        yield f"  {', '.join(names)}"
        for word in words:
            yield from paragraph(word, "    ", "      ")
    yield f'kernel "auto" (head dim {DIM}; other sizes may differ):'
    picked: dict[str, tuple[str, ...]] = {}
    for choice in found["kernels"]:
        key = f"{choice['device']} {choice['dtype']}"
        picked[key] = (*picked.get(key, ()), f"{choice['what']}: {choice['kernel']}")
    for keys, chosen in _together(picked):
        yield from paragraph("  " + ", ".join(keys), hanging="  ")
        yield from (f"    {kernel}" for kernel in chosen)


def _together(found: Mapping[str, tuple[str, ...]]) -> list[tuple[list[str], tuple[str, ...]]]:
    """The names of which the same is to be said, and that."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, said in found.items():
        groups.setdefault(said, []).append(name)
    return [(names, said) for said, names in groups.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "what was found")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """The exit status. Raises OSError where it could not be found out."""
    try:
        found = examine(os.environ)
    except RuntimeError as error:  # of torch, where a driver does not answer
        raise OSError(str(error)) from error
    for line in lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    write_json(options.json, found)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The same as a program of its own."""
    parser = argparse.ArgumentParser(
        prog=typed(COMMAND), description=ABOUT, epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        check_outputs(options)
        return carry_out(options, console())
    except OSError as error:
        print(f"{typed(COMMAND)}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
