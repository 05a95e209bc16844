"""Exports that are killed, and places that only a real mount makes unwritable or full."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune_trainer.claims.names import CLAIMS
from finetune_trainer.config import JobRef
from finetune_trainer.errors import OutputNotWritableError, TrainerError
from finetune_trainer.export import export
from finetune_trainer.export.publish import RECORD, open_staging, publish
from finetune_trainer.failpoints import ENV_FAILPOINT
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.model.load import load_tokenizer
from support.checkpoint.checkpoint_fixtures import run_processes
from support.checkpoint.export_fixtures import (
    PROGRESS,
    claimed_output,
    export_config,
    output_fence,
    trained_model,
)
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts something on a new folder until the test ends."""
    mounted: list[Path] = []

    def run(*arguments: str) -> Path:
        folder = tmp_path / f"mounted-{len(mounted)}"
        folder.mkdir()
        try:
            subprocess.run(["mount", *arguments, str(folder)], check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mount {' '.join(arguments)} is not possible here: {error}")
        mounted.append(folder)
        return folder

    yield run
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def publish_weights(output: Path, content: str) -> None:
    job = JobRef(name="tiny", uid="1")
    fence = claimed_output(output, job)
    staged = open_staging(output, fence.holding(output).claim)
    (staged / "weights").write_text(content)
    publish(staged, output, 3, fence)


def test_a_kill_before_the_files_move_in_leaves_the_older_export(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert run_processes(publish_weights, output, "old") == [0]

    environ = {ENV_FAILPOINT: "before-publish@3"}
    assert run_processes(publish_weights, output, "new", environ=environ) == [-signal.SIGKILL]
    assert (output / "weights").read_text() == "old"

    assert run_processes(publish_weights, output, "new") == [0]
    assert (output / "weights").read_text() == "new"
    assert sorted(path.name for path in output.iterdir()) == [CLAIMS, RECORD, "weights"]


def test_a_read_only_mount_is_found_before_training(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    folder = mount("-t", "tmpfs", "-o", "ro", "tmpfs")
    for output in (folder, folder / "below"):
        config = train_config(tmp_path, output={"dir": str(output)})
        with pytest.raises(OutputNotWritableError, match="Read-only file system") as caught:
            claim_folders(config, lambda: False)
        assert str(caught.value).startswith(f"{output} cannot be written")


def test_a_mount_point_as_output_receives_the_files(base: Path, mount: Callable[..., Path]) -> None:
    output = mount("-t", "tmpfs", "tmpfs")
    config = export_config(base, output)
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    for _ in range(2):
        export(model, tokenizer, config, fence=output_fence(config), progress=PROGRESS, warn=print)
    names = {path.name for path in output.iterdir()}
    assert {"adapter_model.safetensors", "finetune-export.json"} < names
    assert not any(name.startswith(".export-") for name in names)


def test_a_full_disk_is_said_so_and_leaves_no_half_of_a_model(
    base: Path, mount: Callable[..., Path]
) -> None:
    output = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs") / "output"
    config = export_config(base, output)
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    with pytest.raises(TrainerError, match=r"spec.output.uri .* could not be written") as caught:
        export(model, tokenizer, config, fence=output_fence(config), progress=PROGRESS, warn=print)
    assert "No space left on device" in str(caught.value)
    assert [path.name for path in output.iterdir()] == [CLAIMS]
