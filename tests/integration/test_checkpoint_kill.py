"""SIGKILL at every point of a save or a restore: the next attempt ends as if nothing happened."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from checkpoint_fixtures import run_processes, train_and_save
from finetune_trainer.checkpoint.commit import ledger, verify
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run ends with when nothing kills it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_processes(train_and_save, folder / "checkpoints", folder / "report") == [0]
    report: dict[str, Any] = json.loads((folder / "report").read_text())
    return report


@pytest.mark.parametrize(
    ("point", "resumed"),
    [
        pytest.param("saving@4", 2, id="shards written, nothing else"),
        pytest.param("before-manifest@4", 2, id="all files but the manifest"),
        pytest.param("before-rename@4", 2, id="complete but not renamed"),
        pytest.param("after-rename@4", 4, id="renamed"),
        pytest.param("retention@4", 4, id="the old one renamed, not deleted"),
        pytest.param("saving@2", None, id="the first save"),
    ],
)
def test_a_kill_while_saving_loses_no_step_beyond_the_last_commit(
    undisturbed: dict[str, Any], tmp_path: Path, point: str, resumed: int | None
) -> None:
    root, report = tmp_path / "checkpoints", tmp_path / "report"
    environ = {ENV_FAILPOINT: point, ENV_FAILPOINT_ONCE: str(tmp_path / "killed")}

    assert run_processes(train_and_save, root, report, environ=environ) == [-signal.SIGKILL]
    assert run_processes(train_and_save, root, report, environ=environ) == [0]

    assert json.loads(report.read_text()) == undisturbed | {"resumed": resumed}
    assert [path.name for path in root.iterdir()] == ["step-8"]


def test_a_kill_while_restoring_changes_nothing(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    root, report = tmp_path / "checkpoints", tmp_path / "report"
    assert run_processes(train_and_save, root, report, 4) == [0]
    before = ledger(root)

    environ = {ENV_FAILPOINT: "restoring@4"}
    assert run_processes(train_and_save, root, report, environ=environ) == [-signal.SIGKILL]
    assert ledger(root) == before
    verify(root / "step-4")

    assert run_processes(train_and_save, root, report) == [0]
    assert json.loads(report.read_text()) == undisturbed | {"resumed": 4}
