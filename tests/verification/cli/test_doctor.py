"""The doctor tells what is there, with and without GPUs, and says what each setting means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ring.execute
from ring.caching.bounded_cache import BoundedCache
from ring.compute import kernel_choice
from ring.plan.exchange import NAMES
from verification.case import DTYPES
from verification.cli import doctor

NO_GPU = "needs a GPU; there, run: scripts/test tests/verification/cli/test_doctor.py"


def test_doctor_prints_all_and_writes_equal_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert doctor.main(["--json", str(file)]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert f"torch {torch.__version__}" in said.replace("\n ", "") and found["versions"]["torch"] == torch.__version__
    assert list(found["exchanges"]) == list(NAMES)
    assert {choice["dtype"] for choice in found["kernels"]} == set(DTYPES)
    assert len(found["gpus"]) == len(found["peer_access"]) == torch.cuda.device_count()
    for part in ("GPUs: ", "gloo's interface: ", "settings in force", "exchanges:", 'kernel "auto"'):
        assert part in said
    assert doctor.main(["--json", str(file / "x.json")]) == 2
    assert "python -m verification.cli.doctor: error: argument --json" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert "GPUs: none; everything runs on the CPU, joined by gloo" in said and found["versions"]["NCCL"] == "none"
        assert all(list(roads) == ["cpu"] for roads in found["exchanges"].values())
        assert doctor.exchange_transport("ring", "cuda") == "none: there is no GPU"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_with_a_gpu_it_tells_about_it() -> None:
    found = doctor.examine({})
    assert found["gpus"][0]["memory"] > 0 and found["versions"]["NCCL"] != "none"
    assert {choice["device"] for choice in found["kernels"]} == {"cpu", "cuda"}


def test_kernels_are_those_that_were_called(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernel_choice.choose
    picked = {(x["dtype"], x["what"]): x["kernel"] for x in doctor.kernel_choices() if x["device"] == "cpu"}
    assert picked["float32", "full"] == "flash" and "math" in picked["float32", "by position"]
    assert picked["float32", "full, gradient through lse"] == "flash, backward math"
    monkeypatch.setattr(
        kernel_choice, "choose", lambda setting, *arguments: real(setting._replace(candidates=()), *arguments)
    )
    monkeypatch.setattr(ring.execute, "_programs", BoundedCache(8))  # what was chosen before is kept
    assert {x["kernel"] for x in doctor.kernel_choices()} == {"math"}


def test_settings_and_exchanges_are_explained() -> None:
    found = doctor.in_force({"NCCL_NVLS_ENABLE": "0", "HOME": "/x", "TORCH_SYMM_MEM_X": "1", "SECRET": "s"})
    assert [(x["name"], x["value"]) for x in found] == [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_X", "1")]
    for name, part in (
        ("NCCL_IB_DISABLE", "TCP"),  # its own line, not that of its family
        ("NCCL_IB_HCA", "InfiniBand"),
        ("TORCH_NCCL_SOMETHING_NEW", "use of NCCL"),
        *((f"{prefix}X", "a setting of ") for prefix in doctor.OWNERS),
    ):
        assert part in doctor.meaning(name)
    assert doctor.gloo_interface({"GLOO_SOCKET_IFNAME": "lo"}) == "lo"
    assert "nowhere0 is not there" in doctor.gloo_interface({"GLOO_SOCKET_IFNAME": "lo,nowhere0"})
    with pytest.raises(ValueError, match="exchange is 'carrier pigeon'; it must be one of ring, direct, gather"):
        doctor.exchange_transport("carrier pigeon", "cpu")
