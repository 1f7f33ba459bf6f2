"""`python -m verification serving`: the server of its page holds, a fault is found, saved and replayed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.commands import verification
from tests.support.printed import unbroken
from tests.support.serving_faults import CODE, written

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "my_server.py").write_text(CODE)
    (tmp_path / "wrong.py").write_text(written("shard_positions"))
    where = ("--examples", "12", "--seed", "1", "--json", "report.json", "--failures", "kept")
    done = verification(tmp_path, "serving", "my_server:server", "wrong:server", *where)
    assert done.returncode == 1, done.stdout + done.stderr
    held, wrong = json.loads((tmp_path / "report.json").read_text())["peers"]
    assert (held["verdict"], held["examples"], held["supported"]) == ("held", 36, "up to 1,024 tokens")
    assert (wrong["verdict"], wrong["check"]) == ("counter-example", "results of each rank's keys")
    assert (wrong["case"]["calls"], wrong["case"]["world"], wrong["case"]["head_dim"]) == ([[2]], 2, 1)
    assert "sgl-project/sglang#32098" in wrong["message"]
    *_, file = shlex.split(wrong["replay"])
    assert json.loads(Path(file).read_text()) == {"kind": "server", "server": "wrong:server", "case": wrong["case"]}
    assert "if it is yours, write --server wrong:server" in unbroken(verification(tmp_path, "replay", file).stderr)
    again = verification(tmp_path, "replay", file, "--server", "wrong:server")
    assert again.returncode == 1 and unbroken(wrong["message"]) in unbroken(again.stdout), again.stdout + again.stderr
    assert verification(tmp_path, "replay", file, "--server", "my_server:server").returncode == 0
    (tmp_path / "of_nothing.py").write_text(written("of_nothing"))
    refused = verification(tmp_path, "serving", "of_nothing:server")
    said = "of_nothing:server supports none of the Cases drawn on 1 rank"
    assert refused.returncode == 2 and said in unbroken(refused.stdout)
    named = verification(tmp_path, "serving", "my_server.py").stderr
    assert "'my_server.py' is no server; for a Server of your own write my_server:server" in named
