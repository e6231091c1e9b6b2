"""Nothing that a checkpoint says is ever executed: no pickle, no exec, no process in a restore."""

import json
from pathlib import Path

from tests.jobs.kill.zygote import Zygote


def test_a_restore_unpickles_executes_and_starts_nothing(zygote: Zygote, tmp_path: Path) -> None:
    """From disk and from memory; an audit hook sees it, as it sees a pickle and an exec after."""
    pid = zygote.call("tests.jobs.bad_input.audited:restore", {"out": str(tmp_path)}, tmp_path)
    assert zygote.finish(pid, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    seen = json.loads((tmp_path / "seen").read_text())
    assert "open" in seen["events"], "files were read"
    assert seen["forbidden"] == []
    assert {"pickle.find_class", "exec"} <= set(seen["noticed"]), "the hook sees what it is for"
