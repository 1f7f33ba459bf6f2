"""scripts/bench on the CPU: its methods compute what they claim, a rank that fails keeps no other waiting, and its
subcommands record what the notebooks read. No test looks at speed."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench import (
    attention,
    baselines,
    command,
    fused,
    kernel_rates,
    longest,
    model,
    peers,
    published,
    step_run,
    step_timeline,
)
from bench.rank_group import Failed, RankGroup
from bench.workload import AttentionShape, Unsupported, Workload, document_lengths, named

from reference import Pattern, gradients
from reference import attention as oracle
from tests.support.ranks import Ranks
from verification.peers.adapters import flash_attn_shim

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "scripts/bench")]
CPU = torch.device("cpu")
HEADS, SMALL = AttentionShape(8, 2, 4, 2, "float64"), AttentionShape(4, 2, 8, 1, "float32")
ROUNDING = 1e-5  # the plain products on the CPU are formed in float32, of some hundred terms of size 1


def _here() -> RankGroup:
    return RankGroup(dist.get_rank(), dist.get_world_size(), CPU, dist.group.WORLD)


def test_sizes_and_lengths() -> None:
    assert [command.tokens(x) for x in ("1", "48", "2Ki", "1Mi")] == [1, 48, 2048, 2**20]
    assert [named(x) for x in (48, 2048, 3 * 2**20, 1025)] == ["48", "2Ki", "3Mi", "1025"]
    documents = document_lengths(96, 16, 4)
    assert sum(documents) == 96 and all(length % 4 == 0 for length in documents) and len(documents) > 1
    with pytest.raises(ValueError, match="multiple is 4; it must divide the tokens, 96, and the mean length, 18"):
        document_lengths(96, 18, 4)


@pytest.mark.parametrize("documents", [(24,), (7, 0, 1, 16)])
@pytest.mark.parametrize("window", [None, 0, 5, 40])
def test_one_call_of_all_documents_is_right(documents: tuple[int, ...], window: int | None) -> None:
    pattern = Pattern.dense(True, documents, window)
    q, k, v, dout = Workload(pattern, "contiguous", 24, 1, replace(SMALL, dtype="float64")).draw(CPU, 3)
    out = fused.packed(q, k, v, 0.5, documents, window)
    exact = oracle(q, k, v, pattern, scale=0.5)[0], *gradients(q, k, v, pattern, dout, scale=0.5)
    for found, one in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), exact, strict=True):
        torch.testing.assert_close(found, one, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("kinds", [("flash_", ""), ("varlen_", "varlen_")])
def test_stand_ins_equal_flash_attn(kinds: tuple[str, str]) -> None:
    """Arguments go by name, with the defaults of the signature, as in ring-flash-attn's calls."""
    tensors = [x.detach() for x in Workload.dense(6, 1, SMALL).draw(CPU, 3)]
    options, results = dict[str, Any](dropout_p=0.0, softmax_scale=0.5, causal=True), []
    if kinds[1]:
        tensors, edges = [x[0] for x in tensors], torch.tensor([0, 2, 6]).int()
        options |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": 4, "max_seqlen_k": 4}
        options |= {"window_size_left": 1}
    given, dout = dict(zip("qkv", tensors[:3], strict=True)), tensors[3]
    for module, kind in zip((peers, flash_attn_shim), kinds, strict=True):
        calls = [getattr(module, f"{kind}{one}") for one in ("forward", "backward")]
        parameters = inspect.signature(calls[0]).parameters.values()
        asked = given | {x.name: x.default for x in parameters if x.default is not x.empty} | options
        out, lse, *_ = calls[0](**asked)
        grads = {f"d{name}": torch.full_like(x, torch.nan) for name, x in given.items()}
        back = {name: x for name, x in asked.items() if name not in ("return_softmax", "block_table")}
        calls[1](dout=dout, out=out, softmax_lse=lse, **grads, **back)
        results.append(([out, lse, *grads.values()], [inspect.signature(one) for one in calls]))
    assert results[0][1] == results[1][1] and all(map(torch.equal, results[0][0], results[1][0]))
    for wrong in {"dropout_p": 0.5}, {"softcap": 1.0}, {"causal": False, "window_size_left": 1}:
        with pytest.raises(NotImplementedError, match="the kernels of the baselines have"):
            getattr(peers, f"{kinds[0]}forward")(**(asked | wrong))


THREE, ODD = Workload.dense(8, 3, HEADS), Workload.packed(48, 2, HEADS, 16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: baselines.all_to_all(THREE), "2 key/value heads cannot be divided among 3 ranks"),
        (lambda: published.grids(Workload.longnet(24, 1, HEADS, (16,), (1,))), "do not divide"),
        (lambda: published.grids(Workload.longnet(24, 1, HEADS, (12,), (3,))), "8 heads, which the rate 3 does not"),
        (lambda: peers.context_parallel(THREE, THREE.draw(CPU, 0), "alltoall").__enter__(), "GPUs only"),
        (lambda: peers.by_document(ODD, ODD.draw(CPU, 0), "zigzag").__enter__(), "lengths that 4 divides"),
    ],
)
def test_methods_name_unsupported_calls(make: Callable[[], object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        make()


def _one_fails(wrong: tuple[int, ...], memory: bool) -> tuple[str, bool, bool, list[int]]:
    here = _here()

    def call() -> None:
        if here.rank in wrong:
            raise torch.OutOfMemoryError("none left\nmore") if memory else ValueError("no good")

    with pytest.raises(Failed) as failed:
        here.attempt(call)
    return str(failed.value), failed.value.everywhere, failed.value.memory, here.attempt(lambda: 10 + here.rank)


@pytest.mark.ranks
def test_one_rank_fails_and_all_know(ranks: Ranks) -> None:
    for said, *rest in ranks(2).run(_one_fails, (1,), False):
        assert said.startswith("rank 1: ValueError: no good [call, line") and rest == [False, False, [10, 11]]
    for said, *rest in ranks(2).run(_one_fails, (0, 1), True):
        assert said.endswith("(2 of 2 ranks failed)") and rest == [True, True, [10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "then, deadline, stopped",
    [
        ('print(\'{"stopped": "rank 1 failed: out of memory"}\')', 600.0, "rank 1 failed: out of memory"),
        ("sys.exit(5)", 600.0, "ended with exit status 5"),
        ("time.sleep(600)", 5.0, "rank 0 failed: no answer within 5 s"),
    ],
)
def test_the_search_for_the_longest_ends(then: str, deadline: float, stopped: str) -> None:
    done = {"tokens": 4, "total": 8, "seconds": 1.5, "peak_bytes": 7}
    program = f"import sys, time; print({json.dumps(json.dumps(done))}, flush=True); {then}"
    found = longest.supervise(RankGroup(0, 1, CPU), [sys.executable, "-c", program], deadline)
    assert found == done | {"stopped": stopped}


def test_a_record_is_on_disk_after_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    for rank, rows in ((0, 1), (0, 2), (1, 2)):  # of which the second rank writes none
        record = command.BenchRecord(RankGroup(rank, 2, CPU), file, shape=2)
        for _ in range(rows):
            record.add(section="dense", ms=1.23456, note=None)
        said = json.loads(file.read_text())
        assert len(said["rows"]) == rows and said["shape"] == 2 and said["torch"] == torch.__version__
    assert capsys.readouterr().out.splitlines() == ["section=dense  ms=1.235"] * 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "2K"], "'2K'; it must be an integer such as 2048, 2Ki"),
        (["--tokens", "0"], "'0'; it must be at least 1"),
        (["--device", "cpu", "--graph"], "--graph needs a GPU"),
        (["--heads", "8", "--kv-heads", "3"], "multiple of the key/value heads, 3"),
        (["--json", "/nowhere/at/a.json"], "--json: cannot write /nowhere/at/a.json: there is no folder /nowhere/at"),
        (["--section", "dense", "--heads-a-call", "3"], "it must divide the 8 key/value heads"),
        (["--tokens", "8"], "not set: start it with torchrun"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        attention.main(arguments)
    (said,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and said.startswith("error: ") and message in said


@pytest.mark.parametrize(
    "word, code, said",
    [("-h", 0, "scripts/bench attention"), ("reach", 2, "error: subcommand 'reach'; it must be one")],
)
def test_the_command_names_its_subcommands(word: str, code: int, said: str) -> None:
    done = subprocess.run([*COMMAND, word], capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_attention(tmp_path: Path) -> None:
    torchrun = [COMMAND[0], "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", COMMAND[1]]
    chosen = "--device cpu --tokens 16 --mean-length 8 --window 3 --exchange direct --repeats 2 --warmup 1 --peers"
    command = [*torchrun, "attention", *f"{chosen} --reach-limit 32 --json a.json --section".split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *attention.SECTIONS], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["world"] == 2 and record["command"].startswith("torchrun --nproc-per-node=2 scripts/bench attention")
    rows = record["rows"]
    assert {column for row in rows for column in row} <= set(attention.COLUMNS) - {"error"}
    times = {(row["section"], row["pass"], row["method"]): row for row in rows if "ms" in row}
    for where in product(attention.SECTIONS[:4], ("forward", "forward+backward")):
        row, whole = times[*where, "ring_attention"], times[*where, "one GPU, whole sequence"]["ms"]
        assert row["exposed_ms"] == row["ms"] - times[*where, "ring_attention without messages"]["ms"]
        assert row["sent_bytes"] > 0 and row["efficiency"] == whole / 2 / row["ms"]
        if where[0] in ("dense", "longnet"):
            assert row["beyond_kernels_ms"] == row["ms"] - times[*where, "kernels alone"]["ms"]
    assert {("dense", "forward", "all-to-all (Ulysses)"), ("longnet", "forward", "LongNet as published")} <= set(times)
    assert "torch context_parallel, allgather" in {row["method"] for row in rows if "left_out" in row}
    for reached in rows[:2]:
        assert (reached["section"], reached["tokens"], reached["total"]) == ("reach", 32, 64)
        assert "limit of 32 tokens" in reached["stopped"]


@pytest.mark.ranks
@pytest.mark.slow
def test_several_buckets_and_some_heads_at_a_time(tmp_path: Path) -> None:
    torchrun = [COMMAND[0], "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", COMMAND[1]]
    chosen = "--device cpu --tokens 16 --section dense --exchange all-to-all --repeats 2 --warmup 1 --json a.json"
    done = subprocess.run(
        [*torchrun, "attention", *chosen.split(), "--bucket", "8", "32", "--heads-a-call", "1", "2"], cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads((tmp_path / "a.json").read_text())["rows"] if row.get("bucket")]
    timed = {(row["bucket"], row.get("heads_a_call")) for row in rows if row["method"] != "ring_attention"}
    assert timed == set(product((8, 32), (None, 1, 2))) and all(row["ms"] > 0 for row in rows)
    ours = {row["bucket"]: row for row in rows if row["method"] == "ring_attention" and row["pass"] == "forward"}
    assert ours[8]["closed_form_bytes"] < ours[32]["closed_form_bytes"]


@pytest.mark.slow
def test_rates_of_kernels(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    sizes = "--tokens 24 --queries 16 --context 12 --lengths 4 6 --order-lengths 8 --heads 4 --kv-heads 2 --head-dim 8"
    assert kernel_rates.main(["--device", "cpu", *sizes.split(), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {column for row in rows for column in row} <= set(kernel_rates.COLUMNS) - {"error"}
    lengths = [(row["kind"], row["length"], row["kernel"], row["pass"]) for row in rows if row["section"] == "lengths"]
    wanted = set(product(kernel_rates.KINDS, (4, 6, None), ("math",), kernel_rates.PASSES))
    assert len(lengths) == len(wanted) and set(lengths) == wanted
    order = [row for row in rows if row["section"] == "order"]
    assert {(row["kind"], row["causal"]) for row in order} == {("batch", True), ("batch", False), ("documents", True)}
    assert {row["fixed_order"] for row in order} == {True, False}
    assert all(row["off"] == 0 and row.get("repeats", 4) == 4 for row in rows)


FEW = "--warmup 1 --rounds 2 --steps 1 --minutes 60"


def _steps(arguments: str, spoilt: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the subcommand model, and what it found wrong. spoilt: all-to-all returns twice its outputs."""
    right = baselines.all_to_all
    given, record = model.parsed(["--device", "cpu", *arguments.split()]), command.BenchRecord(_here(), None)
    if given.recompute:
        model.measure_recomputed(_here(), record, given)
        return record.rows, []
    with pytest.MonkeyPatch.context() as patch:
        if spoilt:
            patch.setattr(baselines, "all_to_all", lambda workload: lambda q, k, v: 2 * right(workload)(q, k, v))
        return record.rows, model.measure_ways(_here(), record, given)


def test_the_time_of_a_step_by_kinds_of_work() -> None:
    events = [
        ("nvjet_sm90_tst", 100.0, 40.0), ("Memcpy PtoP (Device -> Device)", 110.0, 70.0), ("_put", 150.0, 5.0),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd", 150.0, 20.0), ("_combine", 160.0, 20.0),
        ("void at::native::index_put_kernel", 190.0, 5.0), ("ncclDevKernel_SendRecv", 200.0, 3.0),
    ]  # fmt: skip
    found = step_timeline.timeline(step_timeline.Event(*event) for event in reversed(events))
    assert found == pytest.approx(
        {
            "matrix products": 0.04, "messages": 0.078, "attention": 0.02, "merges": 0.02, "other kernels": 0.005,
            "idle": 0.01 + 0.01 + 0.008,
        }
    )  # fmt: skip
    assert set(found) == set(step_timeline.KINDS) == set(step_timeline.timeline([]))
    with pytest.raises(SystemExit):
        model.parsed(["--device", "cpu", "--timeline"])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode, kinds", [("eager", ("llama", "longnet")), ("compiled", ("longnet",))])
def test_model(ranks: Ranks, mode: str, kinds: tuple[str, ...]) -> None:
    chosen = f"{FEW} --tokens 32 --only {mode} --models {' '.join(kinds)}"
    rows, wrong = ranks(2).run(_steps, chosen, timeout=280)[0]
    assert not wrong
    assert [(row["model"], row["way"]) for row in rows] == [(one, way) for one in kinds for way in model.names_of(one)]
    times = {(row["model"], row["way"]): row["ms"] for row in rows if "left_out" not in row}
    for row in rows:
        assert set(row) <= set(model.STEP_COLUMNS) and model.table_line(row)
        if "left_out" in row:
            assert row["way"] in ("context-parallel", "zigzag") or row["way"].endswith("-on-fa4")
            continue
        assert len(row["rounds"]) == 2 and 0 < row["host_ms"] <= row["wall_ms"]
        assert row["losses_off"] <= step_run.MOST * row["rounding_losses"]
        exact = row["gradients_off"] <= step_run.MOST * row["rounding_gradients"]
        assert exact == (row["way"] != "published"), "its weights are constants"
        assert row["efficiency"] == times[row["model"], "one-gpu"] / 2 / row["ms"]
        if row["way"] == "ours":
            peer = times[row["model"], row["best_peer"]]
            assert row["of_best_peer"] == row["ms"] / peer and row["best_peer"] not in ("ours", "one-gpu")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_way_that_computes_something_else_is_not_timed(ranks: Ranks) -> None:
    chosen = f"{FEW} --tokens 32 64 --only eager --models llama --ways ours all-to-all"
    rows, wrong = ranks(2).run(_steps, chosen, True, timeout=280)[0]
    assert len(wrong) == 1 and wrong[0].startswith("all-to-all of llama, eager: losses are off by")
    found = sorted((row["tokens"], row["way"], "ms" in row, "wrong" in row) for row in rows)
    assert found == [(n, *one) for n in (32, 64) for one in (("all-to-all", False, True), ("ours", True, False))]
    assert not [row for row in rows if "best_peer" in row]


@pytest.mark.ranks
@pytest.mark.slow
def test_recomputed_layers_have_the_loss_of_one_process(ranks: Ranks) -> None:
    chosen = "--tokens 64 --steps 1 --recompute none all attention-kept --compare"
    rows, _ = ranks(2).run(_steps, chosen, timeout=280)[0]
    assert [row["recompute"] for row in rows] == list(model.RECOMPUTED) and len({row["loss"] for row in rows}) == 1
    assert all(row["relative_difference"] < torch.finfo(torch.bfloat16).eps and row["ms"] > 0 for row in rows)
