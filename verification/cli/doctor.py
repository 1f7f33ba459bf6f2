"""What this machine has and will do: GPUs, links, versions, settings in force, exchanges and kernels.

    scripts/doctor [--json FILE]

Works without a GPU, and says so. Exit status: 0 it could be told, 2 it could not. Nothing is judged: what is slow or
unusual here is for the reader to see, what is wrong for `scripts/validate_nccl.py`.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from reference import Pattern, fields
from ring import Layout, ring_attention
from ring.comm.transport import SoloTransport
from ring.compute import kernels
from ring.plan.plan import EXCHANGES
from verification.case import DTYPES
from verification.cli.arguments import add_json, command, typed
from verification.cli.environment import in_force
from verification.cli.outputs import check_file, write_json
from verification.report.text import paragraph

COMMAND = command("verification.cli.doctor", "ring-doctor")
ABOUT = """\
Prints what this machine has and will do: GPUs, links, versions, settings in
force, what carries each exchange, and which kernels are picked. It judges
nothing; a GPU is not needed."""
STATUS = "exit status: 0 it is printed; 2 it could not be found out."
TOPOLOGY_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes
    capability: str


@dataclass(frozen=True)
class Choice:
    """Which kernel takes a tile with kernel="auto". `what`: the tile, in words."""

    device: str
    dtype: str
    what: str
    kernel: str


def gpus() -> list[Gpu]:
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(x.name, x.total_memory, f"{x.major}.{x.minor}") for x in found]


def peer_access() -> list[list[bool]]:
    """Row i, column j: whether GPU i can read GPU j's memory. Its own it can."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def topology() -> str:
    """The links between GPUs as `nvidia-smi topo -m` has them, or why they are not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not known: there is no nvidia-smi"
    try:
        said = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=TOPOLOGY_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: nvidia-smi topo -m: {error}"
    if said.returncode:
        return f"not known: nvidia-smi topo -m ended with {said.returncode}: {(said.stderr or said.stdout).strip()}"
    return said.stdout.rstrip()


def versions() -> dict[str, str]:
    """By name; "none" for what is not there."""
    nccl = cudnn = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.backends.cudnn.is_available():
        cudnn = str(torch.backends.cudnn.version())
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": nccl,
        "cuDNN": cudnn,
        "triton": triton,
    }
    return {name: version or "none" for name, version in found.items()}


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
    """What carries an exchange's keys and values between ranks with tensors on that type of device.

    The one place that knows: a further road is added here, and asked for its own conditions.
    """
    fields.choice("exchange", exchange, EXCHANGES)
    if device == "cpu":
        return "gloo, point to point" if dist.is_gloo_available() else "none: this torch has no gloo"
    if not torch.cuda.is_available():
        return "none: there is no GPU"
    if not dist.is_nccl_available():
        return "none: this torch has no NCCL"
    return "copies out of symmetric memory where the ranks' GPUs are of one host and reach each other, else NCCL"


DIM, TOKENS = 64, 64  # of the tiles that are tried


def kernel_choices() -> list[Choice]:
    """What `auto` picks on each device that is there: seen while ring_attention runs, forward and backward."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    whole = Layout.contiguous(TOKENS, 1)
    shuffled = Layout.from_cuts(torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)), [0, TOKENS])
    tiles = [
        ("full", Pattern.dense(False), whole, False),
        ("causal", Pattern.dense(True), whole, False),
        ("by position", Pattern.dense(True), shuffled, False),
        ("full, gradient through lse", Pattern.dense(False), whole, True),
    ]
    return [
        Choice(device, dtype, what, _picked(torch.device(device), DTYPES[dtype], pattern, layout, through_lse))
        for device in devices
        for dtype in DTYPES
        for what, pattern, layout, through_lse in tiles
    ]


def _picked(device: torch.device, dtype: torch.dtype, pattern: Pattern, layout: Layout, through_lse: bool) -> str:
    """The kernels of forward and backward, by name; one name if they are the same."""
    q, k, v = (torch.ones(1, TOKENS, 2, DIM, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    with _watched("forward") as forward, _watched("backward") as backward:
        result = ring_attention(q, k, v, pattern, layout, group=SoloTransport(), kernel="auto", return_lse=through_lse)
        loss = result[1].sum() if isinstance(result, tuple) else result.sum()
        loss.backward()
    there, back = ("+".join(sorted(names)) or "not seen" for names in (forward, backward))
    return there if there == back else f"{there}, backward {back}"


@contextmanager
def _watched(name: str) -> Iterator[set[str]]:
    """The names with which `ring.compute.kernels.forward` or `backward` is called inside."""
    real, seen = getattr(kernels, name), set[str]()

    def watching(kernel: str, *arguments: Any) -> Any:
        seen.add(kernel)
        return real(kernel, *arguments)

    setattr(kernels, name, watching)
    try:
        yield seen
    finally:
        setattr(kernels, name, real)


def examine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything, as JSON has it."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        "gpus": [asdict(gpu) for gpu in gpus()],
        "peer_access": peer_access(),
        "topology": topology(),
        "versions": versions(),
        "gloo_interface": gloo_interface(environment),
        "settings": [asdict(setting) for setting in in_force(environment)],
        "exchanges": {
            exchange: {device: exchange_road(exchange, device) for device in devices} for exchange in EXCHANGES
        },
        "kernels": [asdict(choice) for choice in kernel_choices()],
    }


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=typed(COMMAND), description=ABOUT, epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser, "what was found")
    options = parser.parse_args(arguments)
    try:
        if options.json is not None:
            check_file("--json", options.json)
        found = examine(os.environ)
        for line in lines(found):
            print(line)
        write_json(options.json, found)
    except (OSError, RuntimeError) as error:  # a driver that does not answer is a RuntimeError of torch
        print(f"{typed(COMMAND)}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
