"""Settings of the environment that matter to ring attention, and what each means here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "TRITON_")

# By name, or by the beginning of names that end in "*". The longest that fits counts.
MEANINGS = {
    "OMP_NUM_THREADS": "threads of one rank on the CPU: more than cores / ranks makes ranks wait for each other",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo: ranks on several machines need one that all can reach",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are, in which order; torchrun's local rank i takes the i-th of these",
    "CUDA_DEVICE_ORDER": "how GPUs are numbered: PCI_BUS_ID numbers them as nvidia-smi does",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues: with 1, kernels start in the order of launch, and an exchange "
    "posted after a kernel does not overtake it",
    "CUDA_LAUNCH_BLOCKING": "with 1, every kernel is waited for: nothing overlaps, so no timing here means anything",
    "CUDA_MODULE_LOADING": "LAZY loads kernels at first use: first calls are slow, and must not be timed",
    "CUDA_HOME": "where a CUDA toolkit is; nothing here is compiled with it",
    "NCCL_DEBUG*": "what NCCL logs; INFO and TRACE slow start-up and fill the log, nothing else changes",
    "NCCL_NVLS_ENABLE": "0: no NVLink SHARP (multicast) in collectives; point-to-point exchanges do not use it, "
    "`gather` may",
    "NCCL_P2P_DISABLE": "1: no direct copies between GPUs over NVLink or PCIe: every hop goes through host memory, "
    "many times slower",
    "NCCL_P2P_LEVEL": "how far apart two GPUs may be for direct copies; beyond that, hops go through host memory",
    "NCCL_SHM_DISABLE": "1: no shared memory within a host: ranks without direct copies go over the network",
    "NCCL_NET*": "which network transport or plug-in NCCL uses between hosts; within one host it does not matter",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE: hops between hosts go over TCP, many times slower",
    "NCCL_IB_*": "how NCCL uses InfiniBand or RoCE between hosts; within one host it does not matter",
    "NCCL_SOCKET_IFNAME": "the network interface of NCCL's bootstrap, and of its traffic where there is no InfiniBand",
    "NCCL_SOCKET_*": "NCCL's use of TCP between hosts",
    "NCCL_CROSS_NIC": "whether a ring may change the network card between hosts",
    "NCCL_ALGO": "forces NCCL's algorithm for collectives: `gather` only",
    "NCCL_PROTO": "forces NCCL's protocol: LL and LL128 lower latency, Simple reaches the full bandwidth",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffer per channel: memory on the GPU that `reference/cost.py` does not count",
    "NCCL_MIN_*": "a lower limit of NCCL's channels, each of which takes an SM from attention while it copies",
    "NCCL_MAX_*": "an upper limit of NCCL's channels: fewer leave more SMs to attention, and copy more slowly",
    "NCCL_NCHANNELS_PER_PEER": "channels of a point-to-point exchange: each takes an SM from attention while it copies",
    "NCCL_CUMEM_ENABLE": "whether NCCL allocates by cuMem, which symmetric registration of buffers needs",
    "NCCL_LAUNCH_MODE": "how NCCL starts kernels of several GPUs in one process; here each rank is a process",
    "NCCL_TOPO_*": "a topology given to NCCL, or written by it: a wrong one makes it choose slow links",
    "NCCL_*": "a setting of NCCL; see its documentation",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what torch does when NCCL fails or times out; with 0 the ranks wait for ever",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks the host until the exchange is done: nothing is launched meanwhile, "
    "so nothing overlaps",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "how torch keeps tensors alive while NCCL uses them: memory freed later or "
    "earlier",
    "TORCH_NCCL_HIGH_PRIORITY": "1: NCCL's streams go before attention's where both wait for an SM",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "whether torch reuses CUDA events of exchanges",
    "TORCH_NCCL_ENABLE_MONITORING": "whether torch's own watchdog may end a process whose NCCL is stuck",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "after which silence torch's own watchdog ends a process; the validation's "
    "--timeout should be less",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many exchanges torch's flight recorder keeps, to be written on a hang",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1: NCCL's calls return before they are done; start-up differs, results do not",
    "TORCH_NCCL_*": "a setting of torch's use of NCCL; see torch's documentation",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: symmetric memory without NVLink multicast, which copies from one GPU to "
    "another do not need",
    "TORCH_SYMM_MEM_*": "a setting of torch's symmetric memory",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective across ranks: slow, for finding mismatches only",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: fp32 products in TF32, 10 bits: results exceed the bounds, which assume "
    "none",
    "TORCH_CUDA_ARCH_LIST": "for which GPUs extensions are compiled; nothing here is",
    "TORCH_CPP_LOG_LEVEL": "what torch's C++ part logs",
    "TORCH_LOGS": "what torch logs",
    "TORCH_*": "a setting of torch; see its documentation",
    "TORCHELASTIC_*": "set by torchrun for the processes that it starts, or a setting of it",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch takes GPU memory: expandable_segments lessens fragmentation, with which long "
    "sequences end out of memory",
    "PYTORCH_ALLOC_CONF": "how torch takes GPU memory: expandable_segments lessens fragmentation, with which long "
    "sequences end out of memory",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1: every tensor is a cudaMalloc, which waits for the GPU: no timing means "
    "anything",
    "PYTORCH_*": "a setting of torch; see its documentation",
    "CUDA_*": "a setting of CUDA; see its documentation",
    "GLOO_*": "a setting of gloo",
    "OMP_*": "a setting of OpenMP, by which torch runs threads on the CPU",
    "TRITON_*": "a setting of Triton, which compiles the fused merge: where its cache is, what it prints",
}


@dataclass(frozen=True)
class EnvironmentSetting:
    name: str
    value: str
    meaning: str


def meaning(name: str) -> str:
    """What a setting with one of PREFIXES means here. Raises KeyError for any other."""
    fits = [key for key in MEANINGS if name == key or (key.endswith("*") and name.startswith(key[:-1]))]
    if not fits:
        raise KeyError(name)
    return MEANINGS[max(fits, key=lambda key: (key == name, len(key)))]


def in_force(environment: Mapping[str, str]) -> list[EnvironmentSetting]:
    """Those that are set, by name."""
    names = sorted(name for name in environment if name.startswith(PREFIXES))
    return [EnvironmentSetting(name, environment[name], meaning(name)) for name in names]
