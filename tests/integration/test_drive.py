"""`drive` with the real local backend: restarts, stops, kills of the driver, and going on."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import job
from decisions import Life
from finetune_operator.api.problems import InvalidJobError
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.base import Observation
from finetune_operator.backends.local import proc
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.backends.local.environment import ENV_MARK
from finetune_operator.backends.local.run_folder import (
    RunFolder,
    RunFolderError,
    RunFolderLockedError,
)
from finetune_operator.reconcile.drive import StopRequest, drive, refuse
from finetune_operator.reconcile.opening import open_job
from local_runs import (
    is_running,
    kill_what_runs_below,
    local_backend,
    run_and_kill,
    starts,
    wait_until,
)

Seen = Callable[[FineTuneJob, Observation | None, StopRequest], None]


def nothing(job: FineTuneJob, observation: Observation | None, stop: StopRequest) -> None:
    """Watch and do nothing."""


def run(
    backend: LocalBackend,
    manifest: FineTuneJob,
    *,
    on_change: Seen = nothing,
    fresh: bool = False,
) -> FineTuneJob:
    """Do what `ftctl run` does, and return the job as it is in the end."""

    async def both(store: RunFolder) -> FineTuneJob:
        stop = StopRequest()
        opened = await open_job(manifest, backend, store, fresh=fresh)
        return await drive(
            opened.job,
            backend,
            store,
            on_change=lambda job, seen: on_change(job, seen, stop),
            stop=stop,
        )

    folders = backend.folders(manifest)
    with RunFolder(folders.run, folders.checkpoint) as store:
        return asyncio.run(both(store))


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    kill_what_runs_below(tmp_path)


def run_dir(folder: Path) -> Path:
    return folder / "runs" / "default" / "tiny"


def at_step(step: int, then: Callable[[StopRequest], None]) -> Seen:
    def look(job: FineTuneJob, seen: Observation | None, stop: StopRequest) -> None:
        if seen and seen.progress and seen.progress.step >= step:
            then(stop)

    return look


def test_a_job_runs_to_completion_and_tells_on_the_way(tmp_path: Path) -> None:
    phases: list[JobPhase] = []
    backend = local_backend(tmp_path, {"*": {"steps": 8, "step_seconds": 0.3}})
    done = run(backend, job(), on_change=lambda job, seen, stop: phases.append(job.status.phase))
    assert list(dict.fromkeys(phases)) == [
        JobPhase.STARTING,
        JobPhase.RUNNING,
        JobPhase.SUCCEEDED,
    ]
    assert done.status.artifacts == [f"file://{run_dir(tmp_path)}/output"]
    assert RunFolder(run_dir(tmp_path)).load() == done


def test_a_killed_worker_is_followed_by_an_attempt_from_its_checkpoint(tmp_path: Path) -> None:
    plays = {"1": {"steps": 8, "save_every": 2, "kill_at": 5}, "2": {"steps": 8}}
    done = run(local_backend(tmp_path, plays), job())
    assert done.status.phase is JobPhase.SUCCEEDED
    assert (done.status.restarts.counted, done.status.attempt) == (1, 2)
    first, second = done.status.attempts
    assert (first.failure_class, first.exit_code) == ("WorkerLost", 137)
    assert second.resumed_step == 4


def test_two_nodes_restart_together_when_one_dies(tmp_path: Path) -> None:
    plays = {"1": {"steps": 1000, "kill_at": 2, "node": 1, "gang": 2}, "2": {"steps": 3}}
    done = run(local_backend(tmp_path, plays), job(topology={"nodes": 2}))
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempts[0].node == "node-1"
    assert starts(tmp_path) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_bad_data_fails_the_job_and_running_it_again_is_another_attempt(tmp_path: Path) -> None:
    plays = {"1": {"steps": 1, "exit_code": 65}, "2": {"steps": 1}}
    backend = local_backend(tmp_path, plays)
    failed = run(backend, job())
    assert failed.status.phase is JobPhase.FAILED
    # No checkpoint exists, so the manifest may be corrected in any way.
    done = run(backend, job(dataset__source="file://./corrected.jsonl"))
    assert done.status.phase is JobPhase.SUCCEEDED
    assert (done.metadata.uid, done.status.attempt) == (failed.metadata.uid, 2)


def test_a_graceful_stop_suspends_with_a_checkpoint_and_the_next_run_goes_on(
    tmp_path: Path,
) -> None:
    backend = local_backend(
        tmp_path, {"1": {"steps": 1000}, "2": {"steps": 100, "step_seconds": 0.01}}
    )
    stopped = run(backend, job(), on_change=at_step(3, lambda stop: stop.request()))
    assert stopped.status.phase is JobPhase.SUSPENDED
    step = stopped.status.checkpoint.last.step if stopped.status.checkpoint.last else 0
    assert step >= 3
    done = run(backend, job())
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempts[1].resumed_step == step
    assert done.status.restarts.counted == done.status.restarts.disruptions == 0


def test_a_forced_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, {"1": {"steps": 10_000, "is_deaf": True}})
    asked: list[bool] = []

    def insist(stop: StopRequest) -> None:
        asked.append(True)
        stop.force() if len(asked) > 1 else stop.request()

    stopped = run(backend, job(), on_change=at_step(1, insist))
    assert stopped.status.phase is JobPhase.SUSPENDED
    assert stopped.status.attempts[0].exit_code == 137


def test_a_second_driver_is_told_whose_job_it_is(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, {"1": {"steps": 3}})
    with (
        RunFolder(run_dir(tmp_path)),
        pytest.raises(RunFolderLockedError, match=f"in use by process {os.getpid()}"),
    ):
        run(backend, job())


def test_a_complete_job_is_moved_aside_with_its_outside_checkpoints(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, {"*": {"steps": 2, "save_every": 2}})
    manifest = job(checkpoint__uri="file://./saved")
    first, second = run(backend, manifest), run(backend, manifest)
    assert first.metadata.uid != second.metadata.uid
    assert second.status.attempts[0].resumed_step is None
    assert RunFolder(run_dir(tmp_path).with_name("tiny.1")).load() == first
    assert (tmp_path / "saved.1" / "step-2").is_dir()
    assert not (tmp_path / "saved.2").exists()


def test_only_checkpoints_are_moved_out_of_a_folder_that_holds_other_things(
    tmp_path: Path,
) -> None:
    backend = local_backend(tmp_path, {"*": {"steps": 2, "save_every": 2}})
    manifest = job(checkpoint__uri="file://./mine")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    run(backend, manifest)
    (mine / "step-1.aside").mkdir()
    run(backend, manifest)
    assert sorted(path.name for path in mine.iterdir()) == ["step-2", "thesis.tex"]
    moved = sorted(path.name for path in (tmp_path / "mine.1").iterdir())
    assert moved == ["step-1.aside", "step-2"]


def test_a_folder_of_somebody_else_is_no_run_directory(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    manifest = job(backend={"local": {"runDirectory": "mine"}})
    for fresh in (False, True):
        with pytest.raises(RunFolderError, match=r"holds thesis.tex and no job.json"):
            run(local_backend(tmp_path), manifest, fresh=fresh)
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_becomes_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    backend = local_backend(tmp_path, {"*": {"steps": 1}})
    done = run(backend, job(backend={"local": {"runDirectory": "here"}}))
    assert done.status.phase is JobPhase.SUCCEEDED


def test_fresh_ends_what_still_runs_before_it_moves_it_aside(tmp_path: Path) -> None:
    manifest = job()
    plays = {"1": {"steps": 10_000, "is_deaf": True}}

    def drive_until_killed() -> None:
        run(
            local_backend(tmp_path, plays),
            manifest,
            on_change=at_step(1, lambda stop: os.kill(os.getpid(), signal.SIGKILL)),
        )

    assert run_and_kill(drive_until_killed, 10**9)
    (line,) = (run_dir(tmp_path) / "starts.txt").read_text().splitlines()
    pid = int(line.split()[2])
    assert is_running(pid)
    done = run(local_backend(tmp_path, {"1": {"steps": 1}}), manifest, fresh=True)
    assert not is_running(pid)
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempt == 1
    old = RunFolder(run_dir(tmp_path).with_name("tiny.1")).load()
    assert old is not None
    assert old.status.phase is JobPhase.SUSPENDED


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dataset__source": "file://./other.jsonl"}, "spec.dataset"),
        ({"training__seed": 7}, "spec.training.seed"),
        ({"method": {"type": "full"}}, "spec.method"),
        ({"checkpoint__uri": "file://./elsewhere"}, "spec.checkpoint.uri"),
        ({"checkpoint__resume_from": "file://./old/step-1"}, "spec.checkpoint.resumeFrom"),
    ],
)
def test_another_training_is_refused_while_the_old_one_is_unfinished(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    backend = local_backend(tmp_path, {"1": {"steps": 1000}, "2": {"steps": 4}})
    run(backend, job(), on_change=at_step(2, lambda stop: stop.request()))
    with pytest.raises(InvalidJobError, match=r"--fresh") as caught:
        run(backend, job(**change))
    assert caught.value.problems[0].path == field
    done = run(backend, job(training__learning_rate=5e-5))
    assert done.status.phase is JobPhase.SUCCEEDED


def test_fsdp_goes_on_with_the_one_process_that_it_cannot_begin_with(tmp_path: Path) -> None:
    plays = {"1": {"steps": 1000, "save_every": 1}, "2": {"steps": 3}}
    backend = local_backend(tmp_path, plays)
    pair, alone = (
        job(strategy__type="fsdp", topology__processes_per_node=count) for count in (2, 1)
    )
    with pytest.raises(InvalidJobError, match=r"spec\.strategy\.type .* at least two processes"):
        run(backend, alone)
    stopped = run(backend, pair, on_change=at_step(2, StopRequest.request))
    assert stopped.status.phase is JobPhase.SUSPENDED
    with pytest.raises(InvalidJobError, match="at least two processes"):
        run(backend, alone, fresh=True)
    assert run(backend, alone).status.phase is JobPhase.SUCCEEDED
    assert starts(tmp_path) == [(1, 0), (2, 0)]


def test_what_is_promised_is_what_the_checkpoint_folder_holds(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, {"1": {"steps": 1000}})
    stopped = run(backend, job(), on_change=at_step(2, lambda stop: stop.request()))
    assert stopped.status.checkpoint.last is not None
    step = stopped.status.checkpoint.last.step

    def note() -> str:
        with RunFolder(run_dir(tmp_path)) as store:
            return asyncio.run(open_job(job(), backend, store)).note

    assert note() == f"going on with attempt 2, from the checkpoint of step {step}"
    (run_dir(tmp_path) / "checkpoints" / f"step-{step}").rename(tmp_path / "gone")
    assert note() == "going on with attempt 2, from the first step, as there is no checkpoint"


def test_a_run_directory_of_another_job_is_refused(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, {"*": {"steps": 1}})
    here = {"local": {"runDirectory": "here"}}
    run(backend, job(backend=here))
    with pytest.raises(RunFolderError, match="holds the job default/tiny, not default/other"):
        run(backend, job(name="other", backend=here))


def test_a_file_that_is_no_job_is_refused_and_moved_aside_by_fresh(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, {"*": {"steps": 1}})
    run_dir(tmp_path).mkdir(parents=True)
    (run_dir(tmp_path) / "job.json").write_text("{")
    with pytest.raises(RunFolderError, match="--fresh"):
        run(backend, job())
    assert run(backend, job(), fresh=True).status.phase is JobPhase.SUCCEEDED


def _survives_a_kill(folder: Path, event: int) -> bool:
    """Kill the driver before its file event and run again; False when it came to its end."""
    folder.mkdir()
    plays = {"1": {"steps": 4, "step_seconds": 0.02, "kill_at": 2}, "2": {"steps": 2}}
    manifest = job(topology={"nodes": 2})

    def drive_it() -> None:
        run(local_backend(folder, plays), manifest)

    was_killed = run_and_kill(drive_it, event)
    if not was_killed:
        return False
    done = run(local_backend(folder, plays), manifest)
    assert done.status.phase is JobPhase.SUCCEEDED, f"killed before event {event}"
    # A node of attempt 1 may be ended before it has begun, as the other one dies early.
    assert len(set(starts(folder))) == len(starts(folder)), f"killed before event {event}"
    assert {(2, 0), (2, 1)} <= set(starts(folder)), f"killed before event {event}"
    assert done.status.restarts.counted == 1
    return True


def test_a_driver_killed_anywhere_loses_no_attempt_and_starts_none_twice(tmp_path: Path) -> None:
    event = 2
    while _survives_a_kill(tmp_path / str(event), event):
        event += 7 if event < 60 else 43  # files are written early, later it mostly looks
    assert event > 50


def test_a_driver_that_comes_back_adopts_what_runs(tmp_path: Path) -> None:
    plays = {"1": {"steps": 30, "step_seconds": 0.05}}

    def drive_until_killed() -> None:
        run(
            local_backend(tmp_path, plays),
            job(),
            on_change=at_step(2, lambda stop: os.kill(os.getpid(), signal.SIGKILL)),
        )

    assert run_and_kill(drive_until_killed, 10**9)
    done = run(local_backend(tmp_path, plays), job())
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempt == 1
    assert starts(tmp_path) == [(1, 0)]
    wait_until(lambda: not proc.marked(ENV_MARK, f"{done.metadata.uid}-1/"))


def test_a_refused_job_is_failed_and_its_open_attempt_closed() -> None:
    life = Life()
    life.see()
    status = refuse(life.job, "attempts/1 belongs to another job", life.now)
    life.job = life.job.model_copy(update={"status": status})
    assert life.condition("Failed") == ("True", "Refused")
    assert life.status.attempts[0].end_time is not None
    assert life.see() == ()
