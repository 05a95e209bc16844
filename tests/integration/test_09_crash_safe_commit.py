"""Neither a kill while saving nor damage on the disk costs more than the newest checkpoint."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_fixtures import (
    flip_a_bit,
    make_state,
    open_store,
    run_processes,
    tensors_differ,
    train_and_save,
)
from finetune_trainer.checkpoint.commit import MANIFEST, ledger, verify
from finetune_trainer.errors import CheckpointError
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
        pytest.param("before-commit@4", 2, id="complete but not renamed"),
        pytest.param("after-commit@4", 4, id="renamed"),
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


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real checkpoints of the steps 1 and 2."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    store = open_store(root)
    for step in (1, 2):
        store.save(step, make_state(step))
    store.wait()
    return root


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(truncate, "bytes instead of|not a manifest", id="truncated"),
        pytest.param(Path.unlink, "is missing|never committed", id="deleted"),
        pytest.param(flip_a_bit, "is damaged", id="one bit flipped"),
    ],
)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "trainer.json", MANIFEST])
def test_a_damaged_file_makes_restore_take_the_checkpoint_before(
    two_checkpoints: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    root = shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    damage(root / "step-2" / name)
    with pytest.raises(CheckpointError, match=reason) as caught:
        verify(root / "step-2")
    assert name in str(caught.value)

    warnings: list[str] = []
    state = make_state(0)
    manifest = open_store(root, warnings).restore(state)

    assert manifest is not None
    assert manifest.step == 1
    assert tensors_differ(state, make_state(1)) == []
    assert warnings[0] == f"checkpoint step-2 is passed over: {caught.value}; trying the one before"


def test_a_real_checkpoint_has_exactly_the_files_that_are_damaged_above(
    two_checkpoints: Path,
) -> None:
    names = sorted(path.name for path in (two_checkpoints / "step-2").iterdir())
    assert names == [".metadata", "__0_0.distcp", MANIFEST, "trainer.json"]
