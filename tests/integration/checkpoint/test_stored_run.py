"""The trainer reads what release 0.1.0 stored: checkpoint, claims, token cache, journal, adapter.

The run of `release_0_1_0/run-killed.tar.xz` was killed in step 6 with checkpoints of steps 2 and 4.
In `run-finished.tar.xz` the release itself resumed and completed it.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.start import job_of_checkpoints, recorded
from finetune_trainer.claims.names import Listing
from finetune_trainer.config import Phase, Progress, Termination, TrainConfig
from finetune_trainer.errors import FolderTakenError, OvertakenError
from finetune_trainer.export.publish import job_of_export
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.load import load_model
from support.cluster.last_release import unpack_run
from support.launch.forked_ranks import attempt, events, numbers, tensors

RECORDED_IN = "/tmp/release-0.1.0"


def config_of(folder: Path, file: str = "config-1.json", **job: Any) -> TrainConfig:
    """Read a stored configuration whose folders are in `folder`; `job` changes its section."""
    text = (folder / file).read_text().replace(RECORDED_IN, str(folder))
    config = TrainConfig.model_validate_json(text)
    return config.model_copy(update={"job": config.job.model_copy(update=job)})


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    unpack_run("run-killed", folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of the killed run, and everything else as the second attempt left it."""
    folder = tmp_path_factory.mktemp("finished")
    unpack_run("run-killed", folder)
    for name in ("checkpoints", "output", "run"):
        shutil.rmtree(folder / name)
    unpack_run("run-finished", folder)
    return folder


def never() -> bool:
    return False


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of each file but locks, which an open alone creates."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def newest_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return tensors(Path(commit.ledger(folder / "checkpoints")[0].path))


def test_stored_checkpoints_are_listed_and_verified(killed: Path) -> None:
    config = config_of(killed)
    root = Path(config.checkpoint.dir)
    assert [ref.step for ref in commit.ledger(root)] == [4, 2]
    for ref in commit.ledger(root):
        manifest = commit.verify(Path(ref.path))
        assert (manifest.job, manifest.step, manifest.world_size) == (config.job, ref.step, 1)
    newest = commit.newest_verified(root, pytest.fail)
    assert newest is not None
    assert newest[1].eval_loss == pytest.approx(6.508, abs=1e-3)
    assert recorded(config.checkpoint, config.job) == newest[1].fingerprint


def test_the_tensors_of_a_stored_checkpoint_are_read_bit_for_bit(killed: Path) -> None:
    stored = json.loads((killed / "tensor-hashes.json").read_text())
    found = {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in newest_tensors(killed).items()
    }
    assert found == stored


def test_training_resumes_a_stored_run_and_ends_as_the_release_did(
    killed: Path, finished: Path
) -> None:
    config = config_of(killed, attempt=2)
    journal = (killed / "run" / "logs" / "rank-0.jsonl").read_bytes()
    cached = files_in(Path(config.data.cache_dir))
    assert len(cached) == 12  # two data sets of five arrays and a manifest

    assert attempt(config) == [0]

    # The current rules name their own entries, and give the same tokens.
    now = files_in(Path(config.data.cache_dir))
    assert now.items() >= cached.items()
    assert len(now) == 24
    assert (killed / "run" / "logs" / "rank-0.jsonl").read_bytes() == journal
    lines = events(config)
    assert {entry["attempt"] for entry in lines} == {1, 2}
    assert [e["step"] for e in lines if e["event"] == "resumed"] == [4]
    # The order of additions, and so the last bits, depend on the CPU that recorded the run.
    ours, theirs = numbers(config), numbers(config_of(finished))
    assert list(ours["steps"]) == list(theirs["steps"]) == list(range(1, 9))
    for step, expected in theirs["steps"].items():
        assert ours["steps"][step] == pytest.approx(expected, rel=1e-4), step
    assert ours["evaluations"] == pytest.approx(theirs["evaluations"], rel=1e-5)
    state, expected_state = (
        tensors(Path(commit.ledger(folder / "checkpoints")[0].path))
        for folder in (killed, finished)
    )
    assert state.keys() == expected_state.keys()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, expected_state[name], rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(tensor, expected_state[name]), name


def test_stored_claims_are_listed_with_every_mark(killed: Path) -> None:
    for name in ("checkpoints", "output", "run"):
        seen = Listing.of(killed / name)
        (claim,) = seen.present
        assert claim[:3] == (0, 1, 1)
        assert claim.uid == config_of(killed).job.uid
        assert seen.doors == seen.held == {claim}
        assert seen.started == ({claim} if name == "checkpoints" else set())


def test_stored_claims_admit_the_next_attempt_of_the_job(killed: Path) -> None:
    config = config_of(killed, attempt=2)
    fence = claim_folders(config, never)
    for folder in (config.checkpoint.dir, config.output.dir, config.run_dir):
        claim = fence.holding(Path(folder)).claim
        assert claim[:3] == (0, 2, 1)
        assert Listing.of(Path(folder)).overtakes(claim) is None
    fence.check()


def test_stored_claims_admit_a_restart_of_the_same_attempt(killed: Path) -> None:
    fence = claim_folders(config_of(killed), never)
    assert fence.holding(killed / "checkpoints").claim[:3] == (0, 1, 2)


def test_stored_claims_refuse_another_job(killed: Path) -> None:
    with pytest.raises(FolderTakenError, match=r"belongs to the job default/tiny \(uid 5f0c6a52"):
        claim_folders(config_of(killed, uid="another"), never)


def test_stored_claims_refuse_an_earlier_attempt(finished: Path) -> None:
    with pytest.raises(OvertakenError):
        claim_folders(config_of(finished), never)


@pytest.mark.parametrize("folder", ["checkpoints", "output"])
def test_the_owner_of_stored_folders_is_known_without_claims(folder: str, finished: Path) -> None:
    owner = {"checkpoints": job_of_checkpoints, "output": job_of_export}[folder](finished / folder)
    assert owner == config_of(finished, attempt=2).job


def test_stored_reports_of_the_run_are_read(finished: Path) -> None:
    text = (finished / "run" / "progress.json").read_bytes()
    progress = Progress.of_any_version(text)
    assert progress == Progress.model_validate_json(text)
    assert (progress.phase, progress.step, progress.attempt) == (Phase.DONE, 8, 2)
    assert progress.resumed_step == 4
    termination = Termination.read(finished / "termination.json")
    assert termination.exit_code == 0
    assert events(config_of(finished))[0]["attempt"] == 1


def test_a_stored_adapter_is_where_another_job_starts(finished: Path) -> None:
    config = config_of(finished)
    assert config.method.lora is not None
    lora = config.method.lora.model_copy(update={"start_from": str(finished / "output")})
    method = config.method.model_copy(update={"lora": lora})
    config = config.model_copy(update={"method": method})

    model = choose_trained(load_model(config, torch.device("cpu")), config)

    stored = load_file(finished / "output" / "adapter_model.safetensors")
    ours = {
        name.replace(".default.", "."): tensor
        for name, tensor in model.state_dict().items()
        if "lora_" in name
    }
    assert ours.keys() == stored.keys()
    assert [name for name, tensor in stored.items() if not torch.equal(tensor, ours[name])] == []
