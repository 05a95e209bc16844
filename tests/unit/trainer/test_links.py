"""A symbolic link on a volume of a pod does not lead out of that volume."""

import os
from pathlib import Path

import pytest

from finetune_trainer.config import ENV_VOLUMES, DatasetSource, FailureClass, TrainConfig
from finetune_trainer.data.source import open_rows
from finetune_trainer.errors import ConfigError, DataError
from finetune_trainer.launch.worker import run_rank
from finetune_trainer.links import check_links
from support.launch.launches import train_config


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file on a volume that the job may mount and the writer of the other one may not."""
    file = tmp_path / "private" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text('{"text": "a secret"}\n')
    return file


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The volume on which another user writes; it holds all folders of the job."""
    for name in ("data", "model", "checkpoints/step-1", "checkpoints/run", "output", "c/tokens"):
        (tmp_path / "shared" / name).mkdir(parents=True)
    (tmp_path / "shared" / "data" / "train.jsonl").write_text('{"text": "a"}\n')
    return tmp_path / "shared"


def config_on(shared: Path) -> TrainConfig:
    data = {"train": {"path": str(shared / "data")}, "cache_dir": str(shared / "c")}
    return train_config(shared, data=data, run_dir=str(shared / "checkpoints" / "run"))


def volumes(*roots: Path) -> dict[str, str]:
    return {ENV_VOLUMES: ":".join(map(str, roots))}


@pytest.mark.parametrize(
    ("link", "target", "field"),
    [
        pytest.param("data/more.jsonl", "private/rows.jsonl", "spec.dataset.source", id="rows"),
        pytest.param("data/up.jsonl", "../../private/rows.jsonl", "spec.dataset.source", id="up"),
        pytest.param("model/config.json", "private/rows.jsonl", "spec.model.source", id="model"),
        pytest.param("model/sub", "private", "spec.model.source", id="folder of a model"),
        pytest.param("checkpoints/step-1/rank-0", "private", "spec.checkpoint.uri", id="shard"),
        pytest.param("checkpoints/run/logs", "private", "spec.checkpoint.uri", id="logs"),
        pytest.param("output/config.json", "private/new", "spec.output.uri", id="new file"),
        pytest.param("c/tokens/KEY.lock", "private/rows.jsonl", "the cache", id="lock"),
    ],
)
def test_a_link_to_another_volume_is_refused(
    tmp_path: Path, shared: Path, secret: Path, link: str, target: str, field: str
) -> None:
    place = shared / link
    place.symlink_to(target if target.startswith("..") else tmp_path / target)
    config, roots = config_on(shared), volumes(shared, secret.parent)
    with pytest.raises(ConfigError) as caught:
        check_links(config, roots)
    message = str(caught.value)
    assert message.startswith(f"{field} {shared}")
    assert f"{place} leads to {os.path.realpath(place)} through a symbolic link" in message
    assert message.endswith("; replace the link by a copy of the file or the folder")
    check_links(config, {})  # outside of a pod, a user may link anywhere


def test_links_within_a_volume_are_followed_and_their_folders_are_checked(
    shared: Path, secret: Path
) -> None:
    blobs = shared / "hub" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0a1b").write_text("{}")
    (shared / "hub" / "snapshots").mkdir()
    (shared / "hub" / "snapshots" / "config.json").symlink_to("../blobs/0a1b")
    (shared / "model" / "config.json").symlink_to("../hub/snapshots/config.json")
    (shared / "model" / "nested").symlink_to("../hub/snapshots")
    (shared / "model" / "itself").symlink_to("../model")
    (shared / "model" / "back").symlink_to("back")
    roots = volumes(shared, secret.parent)
    check_links(config_on(shared), roots)
    (shared / "hub" / "snapshots" / "weights").symlink_to(secret)
    with pytest.raises(ConfigError, match="weights leads to"):
        check_links(config_on(shared), roots)


def test_a_volume_inside_of_another_is_a_volume_of_its_own(shared: Path, secret: Path) -> None:
    inner = shared / "model" / "inner"
    inner.mkdir()
    roots = volumes(shared, inner)
    check_links(config_on(shared), roots)
    (shared / "data" / "more.jsonl").symlink_to(inner)
    with pytest.raises(ConfigError, match="out of the volume"):
        check_links(config_on(shared), roots)


def test_a_pod_reads_and_writes_no_folder_before_its_links_are_checked(
    shared: Path, secret: Path
) -> None:
    config = config_on(shared)
    (shared / "output").rmdir()
    (shared / "output").symlink_to(secret.parent)
    before = sorted(shared.rglob("*"))
    report = run_rank(config, environ=volumes(shared, secret.parent))
    assert report.termination.failure_class is FailureClass.CONFIG_ERROR
    assert report.termination.message.startswith(f"spec.output.uri {shared}/output: ")
    assert sorted(secret.parent.iterdir()) == [secret]
    assert sorted(shared.rglob("*")) == before


def test_a_loop_of_links_is_named(tmp_path: Path, shared: Path) -> None:
    (shared / "model").rmdir()
    (shared / "model").symlink_to("model")
    with pytest.raises(ConfigError, match=r"model is a symbolic link that leads back to itself;"):
        check_links(config_on(shared), {})
    (shared / "data" / "b.jsonl").symlink_to("c.jsonl")
    (shared / "data" / "c.jsonl").symlink_to("b.jsonl")
    for path, sentence in (
        (shared / "data", r"has the symbolic link b.jsonl, which leads back to itself; remove it"),
        (shared / "data" / "b.jsonl", "is a symbolic link that leads back to itself; remove it"),
    ):
        with pytest.raises(DataError, match=sentence):
            open_rows(DatasetSource(path=str(path)), name="train", cache_dir=tmp_path)
