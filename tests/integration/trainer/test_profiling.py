"""Profiles of a run: the contents of a trace, its cost, and steps that cannot be profiled."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import ExitCode, FailureClass, Progress, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.failpoints import ENV_FAILPOINT
from support.launch.forked_ranks import Ranks, events, numbers
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

STEPS = 12
PHASES = {"data_wait", "forward", "backward", "optimizer", "comm_exposed", "logging"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_config(
    inputs: Path, folder: Path, profile: dict[str, Any] | None, max_steps: int = STEPS
) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    return train_config(
        folder,
        model={"path": str(inputs / "model")},
        data={"train": {"path": str(inputs / "train.jsonl")}, "max_seq_len": 64},
        training={"max_steps": max_steps, "schedule": "constant"},
        telemetry={"profile": profile},
    )


def ranges(path: Path) -> list[tuple[str, float, float]]:
    """Return the trainer's ranges in a trace: name, start and end in microseconds."""
    with gzip.open(path, "rt") as file:
        found = json.load(file)["traceEvents"]
    return [
        (one["name"], one["ts"], one["ts"] + one["dur"])
        for one in found
        if one.get("cat") == "user_annotation"
    ]


def profiled(config: TrainConfig, rank: int = 0) -> list[dict[str, Any]]:
    return [one for one in events(config, rank) if one["event"] == "profiled"]


@pytest.mark.full
def test_each_chosen_rank_writes_its_steps_with_their_phases(inputs: Path, tmp_path: Path) -> None:
    profile = {"first_step": 4, "last_step": 6, "ranks": [1]}
    config = run_config(inputs, tmp_path / "profiled", profile)
    plain = run_config(inputs, tmp_path / "plain", None)
    assert Ranks(config).codes() == [0, 0]
    assert Ranks(plain).codes() == [0, 0]
    assert numbers(config) == numbers(plain)

    folder = Path(config.run_dir) / "profiles" / "attempt-1-steps-4-6"
    assert [one.name for one in folder.iterdir()] == ["rank-1.json.gz"]
    found = ranges(folder / "rank-1.json.gz")
    steps = {name: (start, end) for name, start, end in found if name.startswith("ProfilerStep")}
    assert list(steps) == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
    for start, end in steps.values():
        inside = {name for name, since, until in found if start <= since and until <= end}
        assert inside >= PHASES
    assert not any(name == TimedPhase.PROFILING for name, _, _ in found)
    progress = Progress.read(Path(config.run_dir) / "progress.json")
    assert progress.profile is not None
    assert (progress.profile.path, progress.profile.error) == (str(folder), None)

    reports = [one for one in events(config) if one["event"] == "step"]
    assert [one["step"] for one in reports if one["is_profiled"]] == [4, 5, 6]
    # The profiler was started before step 4 and stopped before step 7, outside of both.
    assert [one["step"] for one in reports if one["profiling_seconds"]] == [4, 7]
    rates = [one["tokens_per_second"] for one in reports]
    assert len(set(rates[2:6])) == 1 < len(set(rates))


@pytest.mark.full
def test_a_window_that_the_end_of_the_run_cuts_short_is_written(
    inputs: Path, tmp_path: Path
) -> None:
    """The run is resumed, so steps beyond its end are a warning; a new run refuses them."""
    config = run_config(inputs, tmp_path, {"first_step": 5, "last_step": 8}, max_steps=6)
    refused = Ranks(config)
    assert refused.codes() == [ExitCode.CONFIG, ExitCode.CONFIG]
    assert refused.termination().failure_class is FailureClass.CONFIG_ERROR
    assert "profile.steps 5-8: the run has only 6 steps" in refused.termination().message

    begins = run_config(inputs, tmp_path, None, max_steps=4)
    assert Ranks(begins).codes() == [0, 0]
    assert Ranks(config).codes() == [0, 0]
    warnings = [one["message"] for one in events(config) if one["event"] == "warning"]
    assert any("the run has only 6 steps" in one for one in warnings), warnings
    (report,) = profiled(config)
    assert (report["first_step"], report["last_step"], report["error"]) == (5, 6, None)
    assert len(
        [name for name, *_ in ranges(Path(report["path"]) / "rank-0.json.gz") if "#" in name]
    )


def test_steps_before_a_resume_are_a_warning(inputs: Path, tmp_path: Path) -> None:
    assert Ranks(run_config(inputs, tmp_path, None, max_steps=4)).codes() == [0, 0]
    config = run_config(inputs, tmp_path, {"first_step": 2, "last_step": 3}, max_steps=6)
    assert Ranks(config).codes() == [0, 0]
    warnings = [one["message"] for one in events(config) if one["event"] == "warning"]
    (warning,) = [one for one in warnings if "no step is profiled" in one]
    assert "resumes after step 4" in warning
    assert profiled(config) == []


@pytest.mark.full
def test_a_trace_ends_after_64_micro_batches_and_a_stop_loses_only_the_trace(
    inputs: Path, tmp_path: Path
) -> None:
    config = run_config(inputs, tmp_path, {"first_step": 2, "last_step": 9})
    many = config.training.model_copy(update={"global_batch_size": 2 * 40})
    config = config.model_copy(update={"training": many})
    assert Ranks(config).codes() == [0, 0]
    (report,) = profiled(config)
    assert (report["first_step"], report["last_step"], report["error"]) == (2, 2, None)

    (tmp_path / "stopped").mkdir()
    config = run_config(inputs, tmp_path / "stopped", {"first_step": 3, "last_step": 9})
    environ = {ENV_FAILPOINT: "after-optimizer@5:rank=1:SIGTERM"}
    assert Ranks(config, environ).codes() == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    warnings = [one["message"] for one in events(config) if one["event"] == "warning"]
    assert any("the profile from step 3 is lost" in one for one in warnings), warnings
    assert [one for one in Path(config.run_dir).glob("profiles/*/*") if one.is_file()] == []
    assert Ranks(config.continued()).codes() == [0, 0]
    (report,) = profiled(config)
    assert report["last_step"] == 9


def test_a_full_disk_costs_only_the_profile(inputs: Path, tmp_path: Path, small_disk: Path) -> None:
    profile = {"first_step": 3, "last_step": 8}
    config = run_config(inputs, tmp_path, profile)
    config = config.model_copy(update={"run_dir": str(small_disk / "run")})
    with (small_disk / "other").open("wb") as file:
        file.write(bytes(3 << 20))
    ranks = Ranks(config)
    assert ranks.codes() == [0, 0]
    progress = Progress.read(Path(config.run_dir) / "progress.json")
    assert progress.step == STEPS
    assert progress.profile is not None
    assert "the disk may be full" in str(progress.profile.error)
    assert any("the profile of steps 3 to 8 is lost" in one for one in progress.warnings)
    left = Path(config.run_dir) / "profiles"
    assert [one for one in left.rglob("*") if one.is_file()] == []
