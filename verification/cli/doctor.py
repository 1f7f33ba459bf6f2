"""Report of this machine: hardware, versions, settings, kernels. It does not pass or fail: `validate_nccl.py` does."""

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

from reference import Pattern, validators
from ring import Layout, count_kernels, ring_attention
from ring.comm.transport import SoloTransport
from ring.plan.exchange import NAMES
from verification.case import DTYPES
from verification.cli.arguments import add_json, check_outputs, command, prog_name, write_json
from verification.console import Console
from verification.report.text import paragraph

COMMAND = command("verification.cli.doctor", "ring-doctor")
HELP = "report GPUs, links, versions and settings of this machine"
ABOUT = """\
Prints the GPUs of this machine, their links, versions, environment variables
and their meaning, the transport of each exchange, and the kernels that "auto"
picks. It reports; it does not pass or fail. No GPU is needed."""
STATUS = "exit status: 0 the report is printed; 2 a driver or a file gave an error."
DIM, TOKENS = 64, 64  # of the tiles that show which kernel is picked
# Prefixes of the environment variables that are shown, and their owners, named where MEANINGS has no entry.
OWNERS = {
    "NCCL_": "NCCL", "TORCH_NCCL_": "torch's use of NCCL", "TORCH_SYMM_MEM_": "torch's symmetric memory",
    "TORCH_": "torch", "TORCHELASTIC_": "torchrun", "PYTORCH_": "torch", "CUDA_": "CUDA", "GLOO_": "gloo",
    "OMP_": "OpenMP, which runs torch's CPU threads", "TRITON_": "Triton, which compiles the fused merge",
}  # fmt: skip
# Meaning by name. "*" matches anything; the longest matching key wins.
MEANINGS = {
    "OMP_NUM_THREADS": "CPU threads per rank: with more than cores / ranks, ranks wait for each other",
    "GLOO_SOCKET_IFNAME": "network interface of gloo: ranks on several machines need one that all can reach",
    "CUDA_VISIBLE_DEVICES": "visible GPUs, in order; torchrun's local rank i uses the i-th of these",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues: with 1, an exchange posted after a kernel does not overtake it",
    "CUDA_LAUNCH_BLOCKING": "1: the host waits for every kernel, nothing overlaps, timings mean nothing",
    "CUDA_MODULE_LOADING": "LAZY loads kernels at first use: first calls are slow; do not time them",
    "NCCL_DEBUG*": "NCCL's log level; INFO and TRACE slow start-up and fill the log",
    "NCCL_NVLS_ENABLE": "0: no NVLink SHARP (multicast) in collectives; only `gather` may use it",
    "NCCL_P2P_*": "direct copies between GPUs: without them hops go through host memory, many times slower",
    "NCCL_SHM_DISABLE": "1: no shared memory within a host: ranks without direct copies go over the network",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE: hops between hosts go over TCP, many times slower",
    "NCCL_IB_*": "InfiniBand or RoCE between hosts; no effect within one host",
    "NCCL_SOCKET_IFNAME": "network interface of NCCL's bootstrap, and of its traffic without InfiniBand",
    "NCCL_PROTO": "forces NCCL's protocol: LL and LL128 lower latency, Simple reaches the full bandwidth",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffer per channel: GPU memory that `reference/cost.py` does not count",
    "NCCL_NCHANNELS_PER_PEER": "channels of a point-to-point exchange: each occupies an SM while it copies",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's reaction when NCCL fails or times out; with 0 ranks wait for ever",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks the host until the exchange is done, so nothing overlaps",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "torch kills a process after this silence; choose a smaller --timeout",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: no NVLink multicast; copies between two GPUs do not need it",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL compares every collective across ranks: slow, for finding mismatches only",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: fp32 products in TF32, 10 bits: errors exceed the bounds",
    "PYTORCH_*ALLOC_CONF": "torch's GPU allocator: with expandable_segments longer sequences fit",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1: every tensor is a cudaMalloc that waits for the GPU, timings mean nothing",
}


def meaning(name: str) -> str:
    """Explain an environment variable of one of OWNERS. Raises ValueError for any other."""
    patterns = [pattern for pattern in MEANINGS if fnmatchcase(name, pattern)]
    if patterns:
        return MEANINGS[max(patterns, key=len)]
    owner = OWNERS[max((prefix for prefix in OWNERS if name.startswith(prefix)), key=len)]
    return f"a setting of {owner}; see its documentation"


def in_force(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return name, value and meaning of each environment variable of OWNERS that is set, sorted by name."""
    names = sorted(name for name in environment if name.startswith(tuple(OWNERS)))
    return [{"name": name, "value": environment[name], "meaning": meaning(name)} for name in names]


def topology() -> str:
    """Return the links between GPUs as `nvidia-smi topo -m` prints them, or why they are not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not known: there is no nvidia-smi"
    try:
        output = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: nvidia-smi topo -m: {error}"
    if output.returncode:
        text = (output.stderr or output.stdout).strip()
        return f"not known: nvidia-smi topo -m ended with {output.returncode}: {text}"
    return output.stdout.rstrip()


def versions() -> dict[str, str]:
    """Return versions by name, "none" for what is not installed."""
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    by_name = {
        "python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "cuDNN": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "triton": next((x.version for x in metadata.distributions(name="triton")), None),
    }  # fmt: skip
    return {name: str(version or "none") for name, version in by_name.items()}


def gloo_interface(environment: Mapping[str, str]) -> str:
    """Return the network interface that gloo uses, or why it will fail."""
    if not dist.is_gloo_available():
        return "this torch has no gloo"
    interfaces = environment.get("GLOO_SOCKET_IFNAME")
    names = [name for _, name in socket.if_nameindex()]
    if interfaces is None:
        return f"that of the host name {socket.gethostname()} (one of {', '.join(names)}); within `verification`: lo"
    missing = [name for name in interfaces.split(",") if name not in names]
    return f"{interfaces}, of which {', '.join(missing)} is not there: gloo will fail" if missing else interfaces


def exchange_transport(exchange: str, device: str) -> str:
    """Name the transport of an exchange's keys and values for tensors on that type of device."""
    validators.choice("exchange", exchange, NAMES)
    if device == "cpu":
        return "gloo, point to point" if dist.is_gloo_available() else "none: this torch has no gloo"
    if not torch.cuda.is_available():
        return "none: there is no GPU"
    if not dist.is_nccl_available():
        return "none: this torch has no NCCL"
    return "copies from symmetric memory if the ranks' GPUs share a host and have peer access, else NCCL"


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def kernel_choices() -> list[dict[str, str]]:
    """Return the kernel that `auto` picks for each tile, device and dtype, observed in a forward and backward of
    ring_attention."""
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
    """Return the kernels of forward and backward, as one name if they are the same."""
    q, k, v = (torch.ones(1, TOKENS, 2, DIM, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    with count_kernels() as forward:
        result = ring_attention(q, k, v, pattern, layout, group=SoloTransport(), kernel="auto", return_lse=through_lse)
    with count_kernels() as backward:
        (result[1] if isinstance(result, tuple) else result).sum().backward()
    names = ["+".join(sorted(kernels)) or "not seen" for kernels in (forward, backward)]
    return names[0] if names[0] == names[1] else f"{names[0]}, backward {names[1]}"


def examine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the whole report as JSON. memory: bytes; peer_access[i][j]: GPU i can read GPU j's memory."""
    count = range(torch.cuda.device_count())
    gpus = [torch.cuda.get_device_properties(index) for index in count]
    return {
        "gpus": [{"name": x.name, "memory": x.total_memory, "capability": f"{x.major}.{x.minor}"} for x in gpus],
        "peer_access": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in count] for i in count],
        "topology": topology(), "versions": versions(), "gloo_interface": gloo_interface(environment),
        "settings": in_force(environment),
        "exchanges": {name: {device: exchange_transport(name, device) for device in devices()} for name in NAMES},
        "kernels": kernel_choices(),
    }  # fmt: skip


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Format the report of `examine` in lines of 80 columns; nvidia-smi's may be longer."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield from paragraph(f"versions: {versions}", hanging="  ")
    yield f"GPUs: {len(report['gpus'])}" if report["gpus"] else "GPUs: none; everything runs on the CPU, joined by gloo"
    for index, gpu in enumerate(report["gpus"]):
        yield f"  {index}: {gpu['name']}, {gpu['memory'] / 2**30:.1f} GiB, compute capability {gpu['capability']}"
    if len(report["gpus"]) > 1:
        yield "peer access (row reads column):"
        for index, row in enumerate(report["peer_access"]):
            yield f"  {index}: " + " ".join("yes" if readable else "NO " for readable in row)
    if report["gpus"]:
        yield "links (nvidia-smi topo -m):"
        yield from ("  " + line for line in report["topology"].splitlines())
    yield from paragraph(f"gloo's interface: {report['gloo_interface']}", hanging="  ")
    yield "settings in force:" if report["settings"] else "settings in force: none, all defaults"
    for setting in report["settings"]:
        yield f"  {setting['name']}={setting['value']}"
        yield from paragraph(setting["meaning"], "      ")
    yield "exchanges:"
    exchanges = report["exchanges"].items()
    transports = {name: tuple(f"{device}: {text}" for device, text in x.items()) for name, x in exchanges}
    for names, texts in _merge_equal(transports):
        yield f"  {', '.join(names)}"
        for text in texts:
            yield from paragraph(text, "    ", "      ")
    yield f'kernel "auto" (head dim {DIM}; other sizes may differ):'
    picked: dict[str, tuple[str, ...]] = {}
    for choice in report["kernels"]:
        key = f"{choice['device']} {choice['dtype']}"
        picked[key] = (*picked.get(key, ()), f"{choice['what']}: {choice['kernel']}")
    for keys, kernels in _merge_equal(picked):
        yield from paragraph("  " + ", ".join(keys), hanging="  ")
        yield from (f"    {kernel}" for kernel in kernels)


def _merge_equal(texts: Mapping[str, tuple[str, ...]]) -> list[tuple[list[str], tuple[str, ...]]]:
    """Group the names that have equal texts."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, lines in texts.items():
        groups.setdefault(lines, []).append(name)
    return [(names, lines) for lines, names in groups.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Print the report and return 0. Raises OSError if a driver or the file fails."""
    try:
        report = examine(os.environ)
    except RuntimeError as error:  # torch's, if a driver does not answer
        raise OSError(str(error)) from error
    for line in lines(report):
        console.print(line)
    write_json(options.json, report)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command as a program of its own."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog_name(COMMAND), description=ABOUT, epilog=STATUS, formatter_class=formatter)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        check_outputs(options)
        return carry_out(options, Console())
    except OSError as error:
        print(f"{prog_name(COMMAND)}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
