"""One job run by `ftctl run`'s operator: restarts, stops, kills of the process, and going on."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from finetune_operator.api.problems import InvalidJobError
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.base import Attempt, BackendContext, Observation
from finetune_operator.backends.local import proc
from finetune_operator.backends.local.environment import ENV_MARK
from finetune_operator.backends.local.layout import folders_of
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.backends.local.run_folder import (
    RunFolder,
    RunFolderError,
    RunFolderLockedError,
)
from finetune_operator.cli.run_opening import open_job
from finetune_operator.cli.run_operator import StalledError, follow
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.planner.plan import make_plan
from finetune_operator.reconcile import attempts
from support.api.builders import job
from support.local.local_runs import (
    STAND_IN,
    Plays,
    is_running,
    kill_what_runs_below,
    local_backend,
    local_context,
    run_and_kill,
    starts,
    wait_until,
    write_inputs,
)
from support.reconcile.decisions import START

Seen = Callable[[FineTuneJob, Observation | None, StopSignals], None]


def nothing(job: FineTuneJob, observation: Observation | None, stop: StopSignals) -> None:
    """Watch and do nothing."""


async def work(
    context: BackendContext, manifest: FineTuneJob, on_look: Seen = nothing, *, fresh: bool = False
) -> FineTuneJob:
    folders = folders_of(manifest, context.manifest_dir)
    stop = StopSignals()
    with RunFolder(folders.run, folders.checkpoint) as folder:
        opened = await open_job(
            manifest, folder, context, stop=stop, report=print, fresh=fresh, command=STAND_IN
        )
        return await follow(
            opened.job,
            folder,
            context,
            on_observation=lambda job, seen: on_look(job, seen, stop),
            stop=stop,
            then=opened.then,
            command=STAND_IN,
        )


def run(
    context: BackendContext, manifest: FineTuneJob, on_look: Seen = nothing, *, fresh: bool = False
) -> FineTuneJob:
    """Do what `ftctl run` does, and return the job as it is in the end."""
    return asyncio.run(work(context, manifest, on_look, fresh=fresh))


def note_of(context: BackendContext, manifest: FineTuneJob) -> str:
    """Return what `ftctl run` says before it goes on."""
    folders = folders_of(manifest, context.manifest_dir)
    with RunFolder(folders.run, folders.checkpoint) as folder:
        opening = open_job(manifest, folder, context, stop=StopSignals(), report=print)
        return asyncio.run(opening).note


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path: Path) -> Iterator[None]:
    write_inputs(tmp_path)
    yield
    kill_what_runs_below(tmp_path)


def run_dir(folder: Path) -> Path:
    return folder / "runs" / "default" / "tiny"


def at_step(step: int, then: Callable[[StopSignals], None]) -> Seen:
    def look(job: FineTuneJob, seen: Observation | None, stop: StopSignals) -> None:
        if seen and seen.progress and seen.progress.step >= step:
            then(stop)

    return look


def test_a_job_runs_to_completion_and_tells_on_the_way(tmp_path: Path) -> None:
    phases: list[JobPhase] = []
    here = local_context(tmp_path, {"*": {"steps": 8, "step_seconds": 0.3}})
    done = run(here, job(), lambda job, seen, stop: phases.append(job.status.phase))
    assert list(dict.fromkeys(phases)) == [
        JobPhase.STARTING,
        JobPhase.RUNNING,
        JobPhase.SUCCEEDED,
    ]
    assert done.status.artifacts == [f"file://{run_dir(tmp_path)}/output"]
    assert RunFolder(run_dir(tmp_path)).load() == done


def test_a_killed_worker_is_followed_by_an_attempt_from_its_checkpoint(tmp_path: Path) -> None:
    plays = {"1": {"steps": 8, "save_every": 2, "kill_at": 5}, "2": {"steps": 8}}
    done = run(local_context(tmp_path, plays), job())
    assert done.status.phase is JobPhase.SUCCEEDED
    assert (done.status.restarts.counted, done.status.attempt) == (1, 2)
    first, second = done.status.attempts
    assert (first.failure_class, first.exit_code) == ("WorkerLost", 137)
    assert second.resumed_step == 4


def test_two_nodes_restart_together_when_one_dies(tmp_path: Path) -> None:
    plays = {"1": {"steps": 1000, "kill_at": 2, "node": 1, "gang": 2}, "2": {"steps": 3}}
    done = run(local_context(tmp_path, plays), job(topology={"nodes": 2}))
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempts[0].node == "node-1"
    assert starts(tmp_path) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_bad_data_fails_the_job_and_running_it_again_is_another_attempt(tmp_path: Path) -> None:
    plays = {"1": {"steps": 1, "exit_code": 65}, "2": {"steps": 1}}
    here = local_context(tmp_path, plays)
    failed = run(here, job())
    assert failed.status.phase is JobPhase.FAILED
    # No checkpoint exists, so the manifest may be corrected in any way.
    (tmp_path / "corrected.jsonl").write_text("{}\n")
    done = run(here, job(dataset__source="file://./corrected.jsonl"))
    assert done.status.phase is JobPhase.SUCCEEDED
    assert (done.metadata.uid, done.status.attempt) == (failed.metadata.uid, 2)


def test_a_graceful_stop_suspends_with_a_checkpoint_and_the_next_run_goes_on(
    tmp_path: Path,
) -> None:
    here = local_context(
        tmp_path, {"1": {"steps": 1000}, "2": {"steps": 100, "step_seconds": 0.01}}
    )
    stopped = run(here, job(), at_step(3, lambda stop: stop.asked.set()))
    assert stopped.status.phase is JobPhase.SUSPENDED
    step = stopped.status.checkpoint.last.step if stopped.status.checkpoint.last else 0
    assert step >= 3
    done = run(here, job())
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempts[1].resumed_step == step
    assert done.status.restarts.counted == done.status.restarts.disruptions == 0


def test_a_forced_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"1": {"steps": 10_000, "is_deaf": True}})
    asked: list[bool] = []

    def insist(stop: StopSignals) -> None:
        asked.append(True)
        (stop.forced if len(asked) > 1 else stop.asked).set()

    stopped = run(here, job(), at_step(1, insist))
    assert stopped.status.phase is JobPhase.SUSPENDED
    assert stopped.status.attempts[0].exit_code == 137


def test_a_second_process_is_told_whose_job_it_is(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"1": {"steps": 3}})
    with (
        RunFolder(run_dir(tmp_path)),
        pytest.raises(RunFolderLockedError, match=f"in use by process {os.getpid()}"),
    ):
        run(here, job())


def test_a_complete_job_is_moved_aside_with_its_outside_checkpoints(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"*": {"steps": 2, "save_every": 2}})
    manifest = job(checkpoint__uri="file://./saved")
    first, second = run(here, manifest), run(here, manifest)
    assert first.metadata.uid != second.metadata.uid
    assert second.status.attempts[0].resumed_step is None
    assert RunFolder(run_dir(tmp_path).with_name("tiny.1")).load() == first
    assert (tmp_path / "saved.1" / "step-2").is_dir()
    assert not (tmp_path / "saved.2").exists()


def test_only_checkpoints_are_moved_out_of_a_folder_that_holds_other_things(
    tmp_path: Path,
) -> None:
    here = local_context(tmp_path, {"*": {"steps": 2, "save_every": 2}})
    manifest = job(checkpoint__uri="file://./mine")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    run(here, manifest)
    (mine / "step-1.aside").mkdir()
    run(here, manifest)
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
            run(local_context(tmp_path), manifest, fresh=fresh)
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_becomes_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    here = local_context(tmp_path, {"*": {"steps": 1}})
    done = run(here, job(backend={"local": {"runDirectory": "here"}}))
    assert done.status.phase is JobPhase.SUCCEEDED


def test_fresh_ends_what_still_runs_before_it_moves_it_aside(tmp_path: Path) -> None:
    manifest = job()
    plays = {"1": {"steps": 10_000, "is_deaf": True}}

    def run_until_killed() -> None:
        run(
            local_context(tmp_path, plays),
            manifest,
            at_step(1, lambda stop: os.kill(os.getpid(), signal.SIGKILL)),
        )

    assert run_and_kill(run_until_killed, 10**9)
    (line,) = (run_dir(tmp_path) / "starts.txt").read_text().splitlines()
    pid = int(line.split()[2])
    assert is_running(pid)
    done = run(local_context(tmp_path, {"1": {"steps": 1}}), manifest, fresh=True)
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
    here = local_context(tmp_path, {"1": {"steps": 1000}, "2": {"steps": 4}})
    run(here, job(), at_step(2, lambda stop: stop.asked.set()))
    with pytest.raises(InvalidJobError, match=r"--fresh") as caught:
        run(here, job(**change))
    assert caught.value.problems[0].path == field
    done = run(here, job(training__learning_rate=5e-5))
    assert done.status.phase is JobPhase.SUCCEEDED


def test_fsdp_goes_on_with_the_one_process_that_it_cannot_begin_with(tmp_path: Path) -> None:
    plays = {"1": {"steps": 1000, "save_every": 1}, "2": {"steps": 3}}
    here = local_context(tmp_path, plays)
    pair, alone = (
        job(strategy__type="fsdp", topology__processes_per_node=count) for count in (2, 1)
    )
    with pytest.raises(InvalidJobError, match=r"spec\.strategy\.type .* at least two processes"):
        run(here, alone)
    stopped = run(here, pair, at_step(2, lambda stop: stop.asked.set()))
    assert stopped.status.phase is JobPhase.SUSPENDED
    with pytest.raises(InvalidJobError, match="at least two processes"):
        run(here, alone, fresh=True)
    assert run(here, alone).status.phase is JobPhase.SUCCEEDED
    assert starts(tmp_path) == [(1, 0), (2, 0)]


def test_what_is_promised_is_what_the_checkpoint_folder_holds(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"1": {"steps": 1000}})
    stopped = run(here, job(), at_step(2, lambda stop: stop.asked.set()))
    assert stopped.status.checkpoint.last is not None
    step = stopped.status.checkpoint.last.step

    assert note_of(here, job()) == f"resuming with attempt 2, from the checkpoint of step {step}"
    (run_dir(tmp_path) / "checkpoints" / f"step-{step}").rename(tmp_path / "gone")
    assert (
        note_of(here, job())
        == "resuming with attempt 2, from the first step: there is no checkpoint"
    )


def test_a_run_directory_of_another_job_is_refused(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"*": {"steps": 1}})
    there = {"local": {"runDirectory": "here"}}
    run(here, job(backend=there))
    with pytest.raises(RunFolderError, match="holds the job default/tiny, not default/other"):
        run(here, job(name="other", backend=there))


def test_a_file_that_is_no_job_is_refused_and_moved_aside_by_fresh(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"*": {"steps": 1}})
    run_dir(tmp_path).mkdir(parents=True)
    (run_dir(tmp_path) / "job.json").write_text("{")
    with pytest.raises(RunFolderError, match="--fresh"):
        run(here, job())
    assert run(here, job(), fresh=True).status.phase is JobPhase.SUCCEEDED


def _survives_a_kill(folder: Path, event: int) -> bool:
    """Kill the process before its file event and run again; False when it came to its end."""
    folder.mkdir()
    write_inputs(folder)
    plays: Plays = {"1": {"steps": 4, "step_seconds": 0.02, "kill_at": 2}, "2": {"steps": 2}}
    manifest = job(topology={"nodes": 2}, restart_policy__backoff={"baseSeconds": 0})

    def run_it() -> None:
        run(local_context(folder, plays), manifest)

    was_killed = run_and_kill(run_it, event)
    if not was_killed:
        return False
    done = run(local_context(folder, plays), manifest)
    assert done.status.phase is JobPhase.SUCCEEDED, f"killed before event {event}"
    # A node of attempt 1 may be ended before it has begun, as the other one dies early.
    assert len(set(starts(folder))) == len(starts(folder)), f"killed before event {event}"
    assert {(2, 0), (2, 1)} <= set(starts(folder)), f"killed before event {event}"
    assert done.status.restarts.counted == 1
    return True


@pytest.mark.full
def test_a_process_killed_anywhere_loses_no_attempt_and_starts_none_twice(tmp_path: Path) -> None:
    event = 2
    while _survives_a_kill(tmp_path / str(event), event):
        event += 13 if event < 60 else 86  # files are written early, later it mostly polls
    assert event > 50


def test_a_process_that_comes_back_adopts_what_runs(tmp_path: Path) -> None:
    plays = {"1": {"steps": 30, "step_seconds": 0.05}}

    def run_until_killed() -> None:
        run(
            local_context(tmp_path, plays),
            job(),
            at_step(2, lambda stop: os.kill(os.getpid(), signal.SIGKILL)),
        )

    assert run_and_kill(run_until_killed, 10**9)
    done = run(local_context(tmp_path, plays), job())
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.status.attempt == 1
    assert starts(tmp_path) == [(1, 0)]
    wait_until(lambda: not proc.marked(ENV_MARK, f"{done.metadata.uid}-1/"))


def kill_at_step(context: BackendContext, manifest: FineTuneJob, step: int) -> None:
    """Run a job in another process, which is killed when the job has come to that step."""

    def run_until_killed() -> None:
        run(context, manifest, at_step(step, lambda stop: os.kill(os.getpid(), signal.SIGKILL)))

    assert run_and_kill(run_until_killed, 10**9)


def test_a_change_under_a_living_attempt_comes_once_that_is_suspended(tmp_path: Path) -> None:
    here = local_context(
        tmp_path, {"1": {"steps": 1000}, "2": {"steps": 200, "step_seconds": 0.01}}
    )
    kill_at_step(here, job(), 2)
    changed = job(training__learning_rate=5e-5, restart_policy__max_restarts=7)
    said = (
        "attempt 1 runs with another training; it is stopped with a checkpoint first, because "
        "that changes only while it is suspended"
    )
    assert note_of(here, changed) == said
    done = run(here, changed)
    assert done.status.phase is JobPhase.SUCCEEDED
    assert done.spec == changed.spec
    first, second = done.status.attempts
    assert first.exit_code == 75
    assert second.resumed_step is not None
    assert second.resumed_step >= 2
    used = [
        json.loads((run_dir(tmp_path) / f"attempts/{number}/config.json").read_text())
        for number in (1, 2)
    ]
    assert [one["training"]["learningRate"] for one in used] == [1e-4, 5e-5]
    assert done.status.restarts.counted == 0


def test_a_change_that_may_come_at_any_time_stops_nothing(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"1": {"steps": 60}})
    kill_at_step(here, job(), 2)
    changed = job(restart_policy__max_restarts=7, metadata__labels={"team": "a"})
    late = "; changes of the manifest take effect with the next attempt"
    assert note_of(here, changed) == f"attempt 1 has not ended; following it{late}"
    done = run(here, changed)
    assert (done.status.phase, done.status.attempt) == (JobPhase.SUCCEEDED, 1)
    assert done.metadata.model_extra is not None
    assert done.metadata.model_extra["labels"] == {"team": "a"}


def test_a_failed_job_goes_on_from_its_checkpoint_with_a_new_budget(tmp_path: Path) -> None:
    plays = {
        "1": {"steps": 6, "save_every": 2, "fail_at": 5, "exit_code": 1},
        "2": {"steps": 6, "fail_at": 5, "exit_code": 1},
        "3": {"steps": 6},
    }
    here = local_context(tmp_path, plays)
    once = job(restart_policy={"maxRestarts": 1, "backoff": {"baseSeconds": 0}})
    failed = run(here, once)
    assert failed.status.phase is JobPhase.FAILED
    assert failed.status.restarts.counted == 1
    done = run(here, once)
    assert done.status.phase is JobPhase.SUCCEEDED
    assert [one.resumed_step for one in done.status.attempts] == [None, 4, 4]
    assert done.status.restarts.counted == 0


def test_two_jobs_run_at_once_in_one_folder(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"*": {"steps": 8, "step_seconds": 0.2}})

    async def both() -> tuple[FineTuneJob, FineTuneJob]:
        return await asyncio.gather(work(here, job()), work(here, job(name="other")))

    assert {one.status.phase for one in asyncio.run(both())} == {JobPhase.SUCCEEDED}
    assert (tmp_path / "runs" / "default" / "other" / "output").is_dir()


def test_a_folder_that_cannot_be_written_holds_manifests_of_runs_elsewhere(
    tmp_path: Path, small_disk: Path
) -> None:
    write_inputs(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    elsewhere = {"local": {"runDirectory": str(tmp_path / "elsewhere")}}
    environ = {"HOME": str(tmp_path)}
    here = local_context(small_disk, {"*": {"steps": 1}}, environ)
    assert run(here, job(backend=elsewhere)).status.phase is JobPhase.SUCCEEDED
    assert (tmp_path / "elsewhere" / "output").is_dir()


def test_an_unfinished_run_of_the_version_before_goes_on(tmp_path: Path) -> None:
    """Its `job.json` has no time of creation, no finalizer and no version of the resource."""
    plays = {"1": {"steps": 40, "step_seconds": 0.05}}
    here, backend = local_context(tmp_path, plays), local_backend(tmp_path, plays)
    old = job(metadata={"uid": str(uuid4())})
    old = old.model_copy(update={"status": attempts.open_next(old.status, START)})
    with RunFolder(run_dir(tmp_path)) as folder:
        folder.save(old)
        handle = asyncio.run(backend.submit(backend.render(make_plan(old), Attempt(1))))
        folder.save(old.model_copy(update={"status": attempts.with_handle(old.status, handle)}))
    assert "creationTimestamp" not in (run_dir(tmp_path) / "job.json").read_text()
    assert note_of(here, job()) == "attempt 1 has not ended; following it"
    done = run(here, job())
    assert (done.status.phase, done.status.attempt) == (JobPhase.SUCCEEDED, 1)
    assert done.metadata.uid == old.metadata.uid
    assert starts(tmp_path) == [(1, 0)]


def test_a_job_that_takes_over_goes_on_with_what_the_complete_one_wrote(tmp_path: Path) -> None:
    first = run(local_context(tmp_path, {"1": {"steps": 4, "save_every": 2}}), job())
    second = run(local_context(tmp_path, {"1": {"steps": 6}}), job(take_over=True))
    assert first.metadata.uid != second.metadata.uid
    assert [one.resumed_step for one in second.status.attempts] == [4]
    assert (run_dir(tmp_path) / "attempts.1" / "1").is_dir()


def test_what_somebody_must_mend_ends_the_run_and_is_forgotten_once_it_is_mended(
    tmp_path: Path,
) -> None:
    here = local_context(tmp_path, {"*": {"steps": 1}})
    (tmp_path / "train.jsonl").unlink()
    for _ in range(2):
        with pytest.raises(StalledError, match=r"^spec\.dataset\.source .* does not exist"):
            run(here, job())
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert run(here, job()).status.phase is JobPhase.SUCCEEDED


def test_an_attempt_of_another_job_in_the_way_is_told_and_left_alone(tmp_path: Path) -> None:
    here = local_context(tmp_path, {"*": {"steps": 1}})
    note_of(here, job())  # opens the job
    theirs = run_dir(tmp_path) / "attempts" / "1" / "attempt.json"
    theirs.parent.mkdir(parents=True)
    record = AttemptRecord(uid="other-1", attempt=1, nodes=1, processes_per_node=1, output_dir="x")
    theirs.write_text(record.to_json())
    with pytest.raises(StalledError, match=r"holds attempt other-1, not .*; set another"):
        run(here, job())
    assert AttemptRecord.read(theirs) == record
    assert starts(tmp_path) == []
