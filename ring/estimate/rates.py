"""Speeds of a machine, to predict times."""

from __future__ import annotations

from dataclasses import dataclass

from reference import validators
from ring.compute.kernels import MEASURED
from ring.compute.kernels.kernel import HOPPER, Kernel
from ring.estimate.tile_seconds import GPU

_NAMES = tuple(kernel.name for kernel in MEASURED)
_LEAST = 1e-9  # so that times are finite


@dataclass(frozen=True)
class Kernels:
    """The kernels of a GPU by the table of `scripts/bench kernels`, in place of one rate for all calls.

    Args:
        names: that are installed, of "cudnn", "flash" and "fa4".
        launch: seconds to start a kernel, as a CUDA graph does.
        merging: bytes/s that a merge of partial results, or of gradients, reads and writes; None: it takes no time.

    Raises:
        ValueError: names are none or unknown, launch is negative, or merging less than 1e-9.
    """

    names: tuple[str, ...] = _NAMES
    launch: float = 0.0
    merging: float | None = None

    def __post_init__(self) -> None:
        validators.real("launch", self.launch)
        validators.optional(_rate, "merging", self.merging)
        _check_names("names", self.names)

    def taking(self, dims: tuple[int, int], share: int) -> tuple[Kernel, ...]:
        """Return those that take these head dims, of keys and of values.

        Args:
            dims: of keys and of values.
            share: query heads of a key/value head.
        """
        named = (kernel for kernel in MEASURED if kernel.name in self.names)
        return tuple(kernel for kernel in named if kernel.takes_dims(HOPPER, *dims, share))


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine, to predict times: measured ones of one GPU by `Rates.of`, or your own.

    Args:
        forward: FLOP/s of the kernels in forward, counted as 2 products: 2 * 2 * head dim for a pair.
        backward: FLOP/s of the kernels in backward, counted as 5 products.
        link: bytes/s that a rank sends, and receives at the same time; within a host.
        latency: seconds that a message takes beyond its bytes; within a host.
        ranks_per_host: neighbours that share a host; None: all ranks do.
        link_between, latency_between: of messages between hosts; None: as within a host.
        stage: seconds that a stage takes beyond the operations of its pairs, to start kernels and merge.
        packing: bytes/s of rows that are copied before they are sent, and after; None: it takes no time. Without
            kernels only those of an exchange by heads are counted.
        kernels: measured ones, in place of forward, backward and stage, which are then None, None and 0.

    Raises:
        ValueError: a rate is less than 1e-9, a time negative, a rate between hosts given without ranks_per_host, or
            kernels beside forward, backward or stage.
    """

    forward: float | None
    backward: float | None
    link: float
    latency: float = 0.0
    ranks_per_host: int | None = None
    link_between: float | None = None
    latency_between: float | None = None
    stage: float = 0.0
    packing: float | None = None
    kernels: Kernels | None = None

    @classmethod
    def of(
        cls, gpu: str, *, ranks_per_host: int | None = None, kernels: tuple[str, ...] = _NAMES,
        link_between: float | None = None, latency_between: float | None = None,
    ) -> Rates:  # fmt: skip
        """Return the rates of a GPU that was measured.

        Kernels are those of `ring/compute/gpu/kernel_times.json`. The other rates are of two and four of these GPUs, in
        records of `notebooks/data/exchanges`, captured:

            launch, merging  3e-6 s, 1.4e12 bytes/s: what `direct`'s forward without messages takes beyond its kernels
                             alone, 12 us for 8 MB at 512 tokens and 86 us for 134 MB at 8 Ki
            packing          2e12 bytes/s, each read and written: 83 % of the memory's 4.8e12
            latency          1e-5 s: messages of 2 MB add 17 us to `ring`'s forward of two at 512 tokens, for one, and
                             54 us to that of four, for 3
            link             3e11 bytes/s: rows of `all-to-all` reach 3.1e11 between two, and 3.4e11 between four, at
                             8 Ki tokens forward and backward

        Args:
            gpu: its name in torch: "NVIDIA H200".
            ranks_per_host: neighbours that share a host; None: all ranks do.
            kernels: that are installed; without FlashAttention-4 ("cudnn", "flash").
            link_between, latency_between: of messages between hosts, as in `Rates`: measured by you, as no rate of
                them is recorded. With ranks_per_host, link_between is required.

        Raises:
            ValueError: no such GPU was measured, or an argument is invalid.
        """
        if gpu != GPU:
            raise ValueError(
                f"gpu is {gpu!r}; it must be {GPU!r}, which was measured: for others give "
                "Rates(forward=, backward=, link=) or, to the command, --forward-rate, --backward-rate and --link-rate"
            )
        _check_names("kernels", kernels)
        if ranks_per_host is not None and link_between is None:
            raise ValueError(
                "link_between is None; it must be given with ranks_per_host, in bytes/s (to the command, "
                "--link-rate-between): none was measured"
            )
        return cls(
            None, None, link=3e11, latency=1e-5, ranks_per_host=ranks_per_host, link_between=link_between,
            latency_between=latency_between, packing=2e12, kernels=Kernels(kernels, 3e-6, 1.4e12),
        )  # fmt: skip

    def __post_init__(self) -> None:
        _rate("link", self.link)
        for name in ("latency", "stage"):
            validators.real(name, getattr(self, name))
        for name in ("link_between", "packing"):
            validators.optional(_rate, name, getattr(self, name))
        validators.optional(validators.real, "latency_between", self.latency_between)
        validators.optional(validators.integer, "ranks_per_host", self.ranks_per_host, 1)
        for name in ("link_between", "latency_between"):
            if self.ranks_per_host is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be None without ranks_per_host")
        self._check_kernels()

    def _check_kernels(self) -> None:
        if self.kernels is None:
            for name in ("forward", "backward"):
                _rate(name, getattr(self, name))
            return
        if not isinstance(self.kernels, Kernels):
            raise ValueError(f"kernels is {self.kernels!r}; it must be Kernels() or None")
        for name, without in (("forward", None), ("backward", None), ("stage", 0.0)):
            if getattr(self, name) != without:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {without} with kernels")

    @property
    def links(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Rate and latency within a host, and between hosts."""
        between = self.link_between, self.latency_between
        return (self.link, self.latency), (
            self.link if between[0] is None else between[0],
            self.latency if between[1] is None else between[1],
        )

    def hosts(self, ranks: int) -> tuple[int, ...]:
        """Return the number of each rank's host, (ranks,).

        Args:
            ranks: p.
        """
        return tuple(rank // (self.ranks_per_host or ranks) for rank in range(ranks))


def _check_names(name: str, given: object) -> None:
    if not (isinstance(given, tuple) and given and set(given) <= set(_NAMES)):
        raise ValueError(f"{name} is {given!r}; it must be a tuple of some of {', '.join(map(repr, _NAMES))}")


def _rate(name: str, given: object) -> None:
    validators.at_least(name, validators.positive(name, given), _LEAST)
