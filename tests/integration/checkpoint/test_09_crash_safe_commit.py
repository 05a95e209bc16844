"""Neither a kill while saving nor damage on the disk costs more than the newest checkpoint."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.checkpoint.commit import MANIFEST, ledger, verify
from finetune_trainer.errors import CheckpointError
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE
from support.checkpoint.checkpoint_fixtures import (
    flip_a_bit,
    make_state,
    open_store,
    run_processes,
    step_path,
    steps_in,
    tensors_differ,
    train_and_save,
)
from support.checkpoint.lagging_layer import lagging_layer


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
        pytest.param("before-commit@4", 2, id="complete but not committed"),
        pytest.param("after-commit@4", 4, id="committed"),
        pytest.param("retention@4", 4, id="the old one not deleted yet"),
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
    assert steps_in(root) == ["step-8"]


def test_a_checkpoint_is_committed_in_place_where_nothing_can_be_renamed(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    report, killed = tmp_path / "report", tmp_path / "killed"
    points = ("saving@2", "before-manifest@4", "before-commit@4", "retention@4", "after-commit@6")
    environ = {ENV_FAILPOINT: ",".join(points), ENV_FAILPOINT_ONCE: str(killed)}
    with lagging_layer(tmp_path / "layer", lag_seconds=0.0) as layer:
        root = layer.root / "checkpoints"
        codes = [run_processes(train_and_save, root, report, environ=environ) for _ in points]
        assert codes == [[-signal.SIGKILL]] * len(points)
        assert sorted(path.name for path in killed.iterdir()) == sorted(points)
        assert run_processes(train_and_save, root, report, environ=environ) == [0]
        assert json.loads(report.read_text()) == undisturbed | {"resumed": 6}
        assert steps_in(root) == ["step-8"]
        verify(step_path(root, 8))
        assert layer.refusals() == []


def test_a_kill_while_restoring_changes_nothing(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    root, report = tmp_path / "checkpoints", tmp_path / "report"
    assert run_processes(train_and_save, root, report, 4) == [0]
    before = ledger(root)

    environ = {ENV_FAILPOINT: "restoring@4"}
    assert run_processes(train_and_save, root, report, environ=environ) == [-signal.SIGKILL]
    assert ledger(root) == before
    verify(step_path(root, 4))

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


DAMAGES = [
    (truncate, "bytes instead of|not a valid manifest", "truncated"),
    (Path.unlink, "is missing", "deleted"),
    (flip_a_bit, "is damaged", "one bit flipped"),
]


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        pytest.param(name, damage, reason, id=f"{name} {said}")
        for name in (".metadata", "__0_0.distcp", "trainer.json", MANIFEST)
        for damage, reason, said in DAMAGES
        if (name, said) != (MANIFEST, "deleted")  # then it was never committed
    ],
)
def test_a_damaged_file_makes_restore_take_the_checkpoint_before(
    two_checkpoints: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    root = shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    folder = step_path(root, 2)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=reason) as caught:
        verify(folder)
    assert name in str(caught.value)

    warnings: list[str] = []
    state = make_state(0)
    manifest = open_store(root, warnings).restore(state)

    assert manifest is not None
    assert manifest.step == 1
    assert tensors_differ(state, make_state(1)) == []
    assert warnings[0] == (
        f"checkpoint {folder.name} is skipped: {caught.value}; trying the previous one"
    )


def test_a_real_checkpoint_has_exactly_the_files_that_are_damaged_above(
    two_checkpoints: Path,
) -> None:
    names = sorted(path.name for path in step_path(two_checkpoints, 2).iterdir())
    assert names == [".metadata", "__0_0.distcp", MANIFEST, "trainer.json"]
