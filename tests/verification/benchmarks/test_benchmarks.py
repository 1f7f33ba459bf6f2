"""The parts of the benchmark on the CPU: its baselines compute what they claim, its counts are right, and a rank that
fails keeps no other waiting. No test looks at speed."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reference import attention, cost
from reference.pattern import Pattern
from tests.support.benchmark_tasks import HEADS, errors, errors_on_ranks, follow, longnet, one_fails
from verification.benchmarks import baselines, fused, ours, packed_peers, peer_rings, published, timing
from verification.benchmarks.baselines import Impossible
from verification.benchmarks.rank_group import RankGroup
from verification.benchmarks.results import COLUMNS, BenchRecord, line
from verification.benchmarks.timing import Repeats, clocked, measured
from verification.benchmarks.workload import AttentionShape, Workload, document_lengths, named, size
from verification.cli import bench
from verification.peers.adapters import flash_attn_shim
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
ALONE = RankGroup(0, 1, CPU)
ROUNDING = 1e-5  # the plain products on the CPU are formed in float32, of some hundred terms of size 1


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=60.0, preload=("torch", "tests.support.benchmark_tasks")) as pool:
        yield pool


# --- what is measured -------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [size(x) for x in ("1", "48", "2Ki", "1Mi")] == [1, 48, 2048, 2**20]
    assert [named(x) for x in (48, 2048, 3 * 2**20, 1025)] == ["48", "2Ki", "3Mi", "1025"]
    for wrong in ("", "0", "2K", "-1", "1.5Ki", "Ki"):
        with pytest.raises(ValueError, match="a size is"):
            size(wrong)


def test_heads_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="multiple of the key/value heads, 3"):
        AttentionShape(8, 3)
    with pytest.raises(ValueError, match="dim is 0"):
        AttentionShape(dim=0)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        AttentionShape(dtype="int8")


def test_counts_of_a_dense_workload() -> None:
    workload = Workload.dense(8, 4, AttentionShape(4, 2, 16, 1, "bfloat16"))
    pairs = 4 * 32 * 33 // 2
    assert workload.flops == (4 * 16 * pairs, 14 * 16 * pairs)
    slot = 2 * 16 * 2  # bytes of a key and a value of one head
    assert workload.sent("gather", True) == (
        3 * 8 * 2 * slot,
        3 * 8 * 2 * slot * 4,
    )  # and backward: again, and twice as wide
    accumulator = 8 * 4 * (16 + 1) * 4
    received, own = 24 * 2 * slot, 8 * 2 * slot
    assert workload.memory("gather", 8, True)[0] == accumulator + received + own
    narrow, wide = (workload.sent("direct", on_gpus) for on_gpus in (True, False))
    assert narrow[0] == wide[0] and narrow[1] < wide[1]
    gradients = 8 * (4 + 2 * 2) * 16 * 4 + 8 * 4 * 4
    assert workload.memory("gather", 8, True)[1] == gradients + received * 3 + own + 3 * own * 2


def pairs_of(calls: list[tuple[Any, ...]]) -> int:
    """(query head, query, key) pairs that kernel calls compute."""
    total = 0
    for q, k, _, _, causal in calls:
        rows, keys = q.shape[1], k.shape[1]
        total += q.shape[0] * q.shape[2] * (rows * (rows + 1) // 2 if causal else rows * keys)
    return total


@pytest.mark.parametrize("world", [1, 2, 4])
def test_kernels_alone_compute_what_the_pattern_asks_for(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    seen: list[list[tuple[Any, ...]]] = []
    for module in (baselines, published):
        monkeypatch.setattr(module, "kernels_alone", lambda calls, scale: seen.append(calls))
    shape = AttentionShape(8, 2, 4, 1, "float32")
    dense = Workload.dense(8, world, shape)
    dilated = Workload.longnet(16, world, shape, (4, 8 * world, 16 * world), (1, 4, 16))
    for workload, make in ((dense, baselines.zigzag_kernels), (dilated, published.longnet_kernels)):
        seen.clear()
        for rank in range(world):
            make(workload, workload.draw(CPU, rank), rank)
        assert tuple(map(pairs_of, seen)) == cost.flops(workload.setting).pairs


# --- baselines --------------------------------------------------------------------------------------------------------


def test_longnet_as_published_on_one_rank() -> None:
    found = errors(longnet(32, 1), "published", 0)
    assert max(found[name] for name in ("forward", "out", "dv")) < ROUNDING
    assert found["dq"] > 1e-3 and found["dk"] > 1e-3  # its weights are constants in backward


def test_longnet_as_published_on_two_ranks(pool: Pool) -> None:
    for found in pool.run(errors_on_ranks, longnet(16, 2), "published"):
        assert max(found[name] for name in ("forward", "out", "dv")) < ROUNDING, found


def test_all_to_all(pool: Pool) -> None:
    for found in pool.run(errors_on_ranks, Workload.dense(8, 2, HEADS), "all-to-all"):
        assert max(found.values()) < ROUNDING, found


def test_what_a_baseline_cannot_take() -> None:
    three = Workload.dense(8, 3, HEADS)
    with pytest.raises(Impossible, match="2 key/value heads cannot be divided among 3 ranks"):
        baselines.all_to_all(three, three.draw(CPU, 0))
    with pytest.raises(Impossible, match="do not divide"):
        published.grids(Workload.longnet(24, 1, HEADS, (16,), (1,)))
    with pytest.raises(Impossible, match="8 heads, which the rate 3 does not divide"):
        published.grids(Workload.longnet(24, 1, HEADS, (12,), (3,)))


def test_the_stand_in_has_the_arguments_of_flash_attn() -> None:
    for mine, theirs in (
        (peer_rings.flash_forward, flash_attn_shim.forward),
        (peer_rings.flash_backward, flash_attn_shim.backward),
        (packed_peers.varlen_forward, flash_attn_shim.varlen_forward),
        (packed_peers.varlen_backward, flash_attn_shim.varlen_backward),
    ):
        assert inspect.signature(mine) == inspect.signature(theirs)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5"):
        peer_rings.flash_forward(
            torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0.5, 1.0, True
        )


def test_the_stand_in_computes_as_the_kernel() -> None:
    q, k, v, dout = Workload.dense(6, 1, AttentionShape(4, 2, 8, 1, "float32")).draw(CPU, 3)
    out, lse, _, _ = peer_rings.flash_forward(q.detach(), k.detach(), v.detach(), 0.0, 0.5, True)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    peer_rings.flash_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.5, True)
    whole, _ = fused.attention(q, k, v, 0.5, True)
    assert torch.equal(whole, out)
    for place, exact in zip((dq, dk, dv), torch.autograd.grad(whole, (q, k, v), dout), strict=True):
        assert torch.equal(place, exact)


def test_a_missing_peer_says_so() -> None:
    workload = Workload.dense(8, 1, HEADS)
    with (
        pytest.raises(Impossible, match="GPUs only"),
        peer_rings.context_parallel(workload, workload.draw(CPU, 0), "alltoall"),
    ):
        pass
    if importlib.util.find_spec("ring_flash_attn") is None:
        with pytest.raises(Impossible, match="ring-flash-attn is not installed"):
            peer_rings.zigzag(workload, workload.draw(CPU, 0)).__enter__()
        with pytest.raises(Impossible, match="ring-flash-attn is not installed"):
            packed_peers.llama3(workload, workload.draw(CPU, 0), 0, 1).__enter__()
        with pytest.raises(Impossible, match="ring-flash-attn is not installed"):
            packed_peers.by_document(workload, workload.draw(CPU, 0), "ring").__enter__()


def test_lengths_of_documents_divide_where_they_are_to() -> None:
    documents = document_lengths(96, 16, 4)
    assert sum(documents) == 96 and all(length % 4 == 0 for length in documents)
    assert document_lengths(96, 16) != documents
    with pytest.raises(ValueError, match="multiple is 4; it must divide the tokens, 96, and the mean length, 18"):
        document_lengths(96, 18, 4)
    odd = Workload.packed(48, 2, HEADS, 16)
    assert any(length % 4 for length in odd.pattern.documents or ())
    with pytest.raises(Impossible, match="lengths that 4 divides"):
        packed_peers.by_document(odd, odd.draw(CPU, 0), "zigzag").__enter__()


@pytest.mark.parametrize("exchange", ["ring", "direct", "gather"])
def test_without_messages_every_rank_ends_alone(exchange: str) -> None:
    workload = Workload.dense(8, 4, HEADS)
    for rank in range(4):
        inputs = workload.draw(CPU, rank)
        contender = ours.without_messages(workload, inputs, rank, exchange, "auto", None)
        results = contender.training()
        assert [x.shape for x in results] == [x.shape for x in (inputs[0], *inputs[:3])]
        assert all(bool(x.isfinite().all()) for x in contender.forward())  # the receive buffers hold numbers


def test_buffers_without_messages_are_random_and_stay_where_they_are() -> None:
    silent = ours.Silent(0, 2)
    first = silent.empty("receive buffer 0", (4, 2), torch.bfloat16, CPU)
    assert first.unique().numel() > 1
    assert silent.empty("receive buffer 0", (4, 2), torch.bfloat16, CPU) is first, "a captured call would have new ones"
    others = (("receive buffer 1", (4, 2), torch.bfloat16), ("receive buffer 0", (2, 4), torch.bfloat16))
    assert all(silent.empty(*other, CPU).data_ptr() != first.data_ptr() for other in others)


# --- timing, failures, records ----------------------------------------------------------------------------------------


def test_calls_are_warmed_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    timed = measured(ALONE, lambda: made.append(1), Repeats(warmup=3, repeats=7))
    assert (len(made), timed.samples, timed.warmup) == (10, 7, 3)
    repeats = Repeats(3, 7, slow=2.0, few=3, steady=0.5)
    assert repeats.of(2001.0, False) == repeats.of(2001.0, True) == (2, 3)
    assert repeats.of(0.8, False) == (3, 7) and repeats.of(0.8, True) == (625, 7), "a GPU becomes slower at first"
    assert repeats.of(100.0, True) == (5, 7) and repeats.of(2000.0, True) == (3, 7)
    times = iter([[3000.0], [9.0], [9.0], [5.0, 1.0, 2.0, 100.0, 3.0, 4.0, 4.5]])
    monkeypatch.setattr(timing, "clocked", lambda call, device, count: next(times))
    assert measured(ALONE, lambda: None, Repeats()).ms == 4.0
    assert len(clocked(lambda: None, CPU, 4)) == 4


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[[1.0], [2.0]], [[1.0], [2.0]], [[1.0], [2.0]], [[1.0, 2.0, 90.0], [5.0, 4.0, 3.0]]])
    monkeypatch.setattr(RankGroup, "attempt", lambda self, call: next(times))
    assert measured(ALONE, lambda: None, Repeats()).ms == 4.0


def test_one_rank_fails_and_all_know(pool: Pool) -> None:
    for said, everywhere, memory, after in pool.run(one_fails, (1,), False):
        assert said.startswith("rank 1: ValueError: no good [call, line")
        assert (everywhere, memory, after) == (False, False, [10, 11])
    for said, everywhere, memory, after in pool.run(one_fails, (0, 1), True):
        assert "OutOfMemoryError: none left [" in said and said.endswith("(2 of 2 ranks failed)")
        assert (everywhere, memory, after) == (True, True, [10, 11])


SAYS = "import json; say = lambda **x: print(json.dumps(x), flush=True); say(tokens=4, seconds=1.5, peak_bytes=7); "
STUCK = SAYS + "say(tokens=8, seconds=2.5, peak_bytes=9); import threading; threading.Event().wait()"


def and_then_stuck(file: Path) -> str:
    """Has said all that it says when the file is there."""
    says, stuck = STUCK.split("import threading")
    return f"{says}open({str(file)!r}, 'w').close(); import threading{stuck}"


def after(file: Path, end: str) -> str:
    """Comes to its end after the other program has said all, however slowly that starts."""
    return f"{SAYS}import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.05)\n{end}"


def test_reach_ends_when_one_rank_is_out_of_memory_and_another_waits(pool: Pool, tmp_path: Path) -> None:
    said = tmp_path / "said"
    out = after(said, "say(ended='failed: out of memory: no more')")
    for found in pool.run(follow, (and_then_stuck(said), out), 600.0):  # the pool's own timeout is shorter
        assert found.pop("stopped") == "rank 1 failed: out of memory: no more"
        assert found == {"tokens": 4, "total": 8, "seconds": 1.5, "peak_bytes": 7}


def test_reach_ends_when_nobody_answers(pool: Pool) -> None:
    (found, _) = pool.run(follow, (STUCK, STUCK), 3.0)
    assert found["stopped"] == "rank 0 failed: no answer within 3 s"


def test_reach_ends_when_a_process_dies(pool: Pool, tmp_path: Path) -> None:
    said = tmp_path / "said"
    (found, _) = pool.run(follow, (and_then_stuck(said), after(said, "raise SystemExit(5)")), 600.0)
    assert (found["tokens"], found["stopped"]) == (4, "rank 1 failed: ended with exit status 5")


def test_a_record_is_on_disk_after_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    record = BenchRecord({"world": 2}, file, speaks=True)
    for number in range(2):
        record.add(section="dense", ms=1.23456, note=None)
        assert len(json.loads(file.read_text())["rows"]) == number + 1
    assert capsys.readouterr().out.splitlines() == ["section=dense  ms=1.235"] * 2 == [line(record.rows[0])] * 2
    BenchRecord({}, tmp_path / "other.json", speaks=False).add(section="dense")
    assert not (tmp_path / "other.json").exists() and not capsys.readouterr().out


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "2K"], "a size is '2K'"),
        (["--device", "cpu", "--graph"], "--graph needs a GPU"),
        (["--heads", "8", "--kv-heads", "3"], "multiple of the key/value heads, 3"),
        (["--segments", "8", "16", "--rates", "1"], "must be equally many"),
        (["--section", "sparse"], "invalid choice: 'sparse'"),
        (["--json", "/nowhere/at/a.json"], "--json: cannot write /nowhere/at/a.json: there is no folder /nowhere/at"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.checked(bench.parsed(arguments))
    (said,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and said.startswith("error: ") and message in said


def test_help_names_what_was_typed_and_explains_every_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["../scripts/bench_ring.py"])
    with pytest.raises(SystemExit) as stopped:
        bench.parsed(["--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0
    assert said.startswith("usage: torchrun --nproc-per-node=P ../scripts/bench_ring.py [OPTION ...]\n")
    for name, meaning in COLUMNS.items():
        assert f"\n  {name:<19}{meaning[:60]}" in said, name


def test_places_that_will_not_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bench.check_place("cuda")
    assert stopped.value.code == 2 and "start it with torchrun" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        bench.check_place("cuda")
    assert stopped.value.code == 2 and "there must be 2 GPUs, one a rank, and there are 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_over_gloo(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m",
         "verification.cli.bench",
         "--device", "cpu", "--section", "dense", "longnet", "reach", "--tokens", "16", "--exchange", "direct",
         "--repeats", "2", "--warmup", "1", "--reach-limit", "32", "--peers", "--json", str(file)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["world"] == 2 and record["torch"] == torch.__version__ and record["command"].count("--peers") == 1
    rows = record["rows"]
    assert not [row for row in rows if "error" in row]
    assert {column for row in rows for column in row} <= set(COLUMNS)
    for pattern in ("dense", "longnet"):
        (reached,) = [row for row in rows if row["section"] == "reach" and row["pattern"] == pattern]
        assert reached["tokens"] == 32 and "limit of 32 tokens" in reached["stopped"]
        mine = [row for row in rows if row["section"] == pattern and row["method"] == "ring_attention"]
        assert [row["pass"] for row in mine] == ["forward", "forward+backward"]
        for row in mine:
            assert row["exposed_ms"] is not None and row["beyond_kernels_ms"] == row["ms"] - row["kernels_alone_ms"]
            (whole,) = [
                x for x in rows if x["section"] == pattern and x.get("method") == "one GPU, whole sequence"
                and x["pass"] == row["pass"]
            ]  # fmt: skip
            assert row["efficiency"] == whole["ms"] / 2 / row["ms"] and row["sent_bytes"] > 0
    methods = {row["method"] for row in rows if "ms" in row}
    assert methods >= {
        "kernels alone",
        "ring_attention without messages",
        "all-to-all (Ulysses)",
        "LongNet as published",
    }
    left_out = {row["method"] for row in rows if "left_out" in row}
    assert "torch context_parallel, allgather" in left_out


@pytest.mark.parametrize("documents", [(24,), (7, 0, 1, 16)])
@pytest.mark.parametrize("window", [None, 0, 5, 40])
def test_one_call_of_all_documents_is_right(documents: tuple[int, ...], window: int | None) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 24, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    exact, _ = attention(q, k, v, Pattern.dense(True, documents, window), scale=0.5)
    found = fused.packed(q, k, v, 0.5, documents, window)
    torch.testing.assert_close(found, exact, rtol=ROUNDING, atol=ROUNDING)
