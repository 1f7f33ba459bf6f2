"""`python -m verification serving`: the server of its page, faults that are found, saved and replayed, one case."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import ROOT, verification
from tests.support.printed import unbroken

pytestmark = pytest.mark.ranks
(CODE,) = re.findall(
    r"```python\n(# my_server\.py\n.*?)```", (ROOT / "verification/serving/README.md").read_text(), re.DOTALL
)


@pytest.mark.slow
def test_the_server_of_the_page_holds_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_server.py").write_text(CODE)
    right, wrong = "<= positions[:, None]", "<= positions[:, None] + call.block"
    (tmp_path / "wrong.py").write_text(CODE.replace("dist.all_reduce(merged, group=group)", "pass"))
    (tmp_path / "late.py").write_text(CODE.replace(right, wrong))
    names = ("my_server:server", "wrong:server", "late:server")
    done = verification(
        tmp_path, "serving", *names, "--examples", "12", "--seed", "1", "--json", "report.json", "--failures", "kept"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    held, unmerged, late = json.loads((tmp_path / "report.json").read_text())["peers"]
    assert (held["verdict"], held["examples"], held["supported"]) == ("held", 36, "everything")
    assert (unmerged["verdict"], unmerged["check"]) == ("counter-example", "merged results")
    assert unmerged["case"]["world"] == 2 and unmerged["case"]["heads"] == unmerged["case"]["head_dim"] == 1
    assert late["verdict"] == "counter-example" and late["case"]["calls"] == [[2]]
    *_, file = shlex.split(late["replay"])
    assert json.loads(Path(file).read_text()) == {"kind": "server", "server": "late:server", "case": late["case"]}
    refused = verification(tmp_path, "replay", file)
    assert refused.returncode == 2 and "if it is yours, write --server late:server" in unbroken(refused.stderr)
    again = verification(tmp_path, "replay", file, "--server", "late:server")
    assert again.returncode == 1 and unbroken(late["message"]) in unbroken(again.stdout), again.stdout + again.stderr
    assert verification(tmp_path, "replay", file, "--server", "my_server:server").returncode == 0


@pytest.mark.slow
def test_one_case_is_checked_and_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "my_server.py").write_text(CODE.replace("return case\n", "return case if case.block == 4 else None\n"))
    line = "world=2 block=4 calls=9,0/1,3/-2,1 heads=4"
    done = verification(tmp_path, "serving", "my_server:server", "--case", line)
    assert done.returncode == 0 and "1 held" in done.stdout, done.stdout + done.stderr
    for arguments, said in (
        (("my_server:server", "--case", line.replace("block=4", "block=2")), "argument --case: world=2 block=2"),
        (("my_server:server", "--case", "world=2 calls=1 dance=3"), "unknown field dance"),
        (("my_server:server", "--only", "nothing"), "argument --only: 'nothing' is no property or law"),
        (("my_server.py",), "write my_server:server"),
    ):
        done = verification(tmp_path, "serving", *arguments)
        assert done.returncode == 2 and said in unbroken(done.stdout + done.stderr), done.stdout + done.stderr
