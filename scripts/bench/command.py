"""Shared code of the subcommands: options, joining the ranks, records as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bench.rank_group import Failed, Lost, RankGroup, described
from ring.estimate.__main__ import integer
from verification import whole_file
from verification.cli.arguments import check_file
from verification.peers.adapters import ring_flash_attn
from verification.report.provenance import surroundings, typed_words
from verification.wording import counted


class Parser(argparse.ArgumentParser):
    """Parser of a subcommand's options. epilog: see `columns`."""

    def __init__(self, subcommand: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"{sys.argv[0]} {subcommand}", description=description, epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument("--json", type=Path, metavar="FILE", help="file for the record")

    def on_ranks(self) -> None:
        self.usage = f"torchrun --nproc-per-node=P {self.prog} [OPTION ...]"
        self.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial over gloo, with "
            "tiny sizes")  # fmt: skip

    def parsed(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse the options. Raises SystemExit, as `stop`, for invalid ones and for a file that cannot be written."""
        options = self.parse_args(arguments)
        if options.json is not None:
            try:
                check_file("--json", options.json)
            except OSError as error:
                stop(str(error))
        return options

    def error(self, message: str) -> NoReturn:
        stop(message)


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def stop(message: str) -> NoReturn:
    """Exit with status 2, and print on rank 0 an error that all ranks found."""
    if os.environ.get("RANK", "0") == "0":
        fail(message)
    raise SystemExit(2)


def tokens(text: str) -> int:
    """Parse tokens: "2048", "2Ki", "1Mi" -> int."""
    if (number := integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be at least 1")
    return number


def columns(meanings: Mapping[str, str]) -> str:
    """Return the meaning of every column, for a help text."""
    lines = ["columns of a row; one that does not apply is not printed:"]
    for name, meaning in meanings.items():
        lines += textwrap.wrap(meaning, 116, initial_indent=f"  {name:<19}", subsequent_indent=" " * 21)
    return "\n".join(lines)


# --- ranks ------------------------------------------------------------------------------------------------------------


def check_place(device: str) -> None:
    """Raises SystemExit if torchrun did not start this process, or if there are too few GPUs."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        stop(f"{', '.join(missing)} not set: start it with torchrun --nproc-per-node=P {sys.argv[0]}")
    if device == "cpu":
        torch.set_num_threads(1)
        return
    available, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if available < needed:
        stop(f"{counted(needed, 'GPU')} needed, one per rank, got {available}; --device cpu needs none")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def measured_on_ranks(device: str, measure: Callable[[RankGroup], list[str]]) -> int:
    """Join the ranks and measure. measure: returns a message for each wrong result.

    Returns the exit status: 0 measured, 1 wrong results. If the run cannot start or finish, it raises SystemExit of
    status 2, or ends the process with it.
    """
    try:
        ranks = RankGroup.join(device)
    except Exception as error:  # torch.distributed raises whatever its backends do
        stop(f"the ranks could not be joined: {described(error)}")
    try:
        wrong = measure(ranks)
    except (Lost, Failed) as reason:
        fail(str(reason))
        sys.stderr.flush()
        os._exit(2)  # a call that hangs on a GPU would delay a normal exit
    if ranks.rank == 0:
        for message in wrong:
            fail(message)
    dist.destroy_process_group()
    return 1 if wrong else 0


# --- records ----------------------------------------------------------------------------------------------------------


def command_line(world: int) -> str:
    """Return the command line, as typed in the root of the repository."""
    return f"torchrun --nproc-per-node={world} scripts/bench {typed_words(sys.argv[1:])}".rstrip()


def line(row: Mapping[str, Any]) -> str:
    """Format a row."""
    texts = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()]
    return "  ".join(text for text in texts if not text.endswith("=None"))


class BenchRecord:
    """Record on rank 0, which prints each row and rewrites the file: an interrupted run leaves all rows so far.

    file: for the JSON, or None. format_row: for the terminal. fields: of the whole run, besides device, versions,
    commit and command.
    """

    def __init__(
        self, ranks: RankGroup, file: Path | None, format_row: Callable[[dict[str, Any]], str] = line, **fields: Any
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._first, self._file, self._format_row = ranks.rank == 0, file, format_row
        self._run = surroundings(ranks.device.type, ranks.world, command_line(ranks.world))
        self._run |= {"ring-flash-attn": ring_flash_attn.zigzag.version} | fields

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if not self._first:
            return
        print(self._format_row(row), flush=True)
        if self._file is not None:
            whole_file.write(self._file, json.dumps(self._run | {"rows": self.rows}, indent=1) + "\n")
