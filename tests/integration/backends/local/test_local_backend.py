"""The local backend with real processes: adoption, grace, lost nodes, termination messages."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from finetune_operator.backends.base import Attempt, AttemptPhase, Backend, Handle, Observation
from finetune_operator.backends.local import locks, proc
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.reconcile.failures import verdict
from finetune_operator.testing.suite import BackendSuite, Harness, gone
from finetune_trainer.config import FailureClass
from support.api.builders import after, job, planned, ref_to
from support.local.local_runs import (
    is_running,
    kill_what_runs_below,
    local_backend,
    run_and_kill,
    starts,
    wait_until,
)

T = TypeVar("T")


class LocalHarness(Harness):
    job = job()

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Backend]:
        play = {"steps": 1000, "step_seconds": 3600, "is_silent": True}
        yield local_backend(self._folder, {"*": play})

    async def state(self) -> Any:
        wait_until(self._is_quiet)
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    def _is_quiet(self) -> bool:
        """Say whether each node that was started has ended, or sleeps: it writes files before."""
        return all(
            "starts at step" in log.read_text() or _has_ended(log.with_suffix(".lock"))
            for log in self._folder.rglob("node-*.log")
        )


def _has_ended(lock: Path) -> bool:
    with locks.held(lock) as is_free:
        return is_free


class TestLocalBackend(BackendSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> LocalHarness:
        return LocalHarness(tmp_path)


def wait_for(what: Coroutine[Any, Any, T]) -> T:
    """Run one verb to its end; another process may call the next one."""
    return asyncio.run(what)


def observed_until_gone(backend: Backend, handle: Handle) -> Observation:
    return wait_for(gone(backend, ref_to(handle)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for the manifest; what a failing test left running is ended."""
    yield tmp_path
    kill_what_runs_below(tmp_path)


def _pid(file: Path) -> int:
    return int(json.loads(file.read_text())["pid"])


def _submit(backend: LocalBackend, **overrides: Any) -> Handle:
    request = backend.render(planned(**overrides), Attempt(1))
    handle = wait_for(backend.submit(request))
    nodes = request.objects[2:]
    wait_until(lambda: wait_for(backend.observe(ref_to(handle))).phase is not AttemptPhase.PENDING)
    folder = Path(request.name)
    wait_until(lambda: all((folder / f"node-{n}.json").exists() for n in range(len(nodes))))
    return handle


def _main_pid(folder: Path, node: int = 0) -> int:
    return _pid(folder / "runs/default/tiny/attempts/1" / f"node-{node}.json")


def test_a_finished_attempt_succeeds_with_its_last_words(folder: Path) -> None:
    backend = local_backend(folder, {"1": {"steps": 2}})
    seen = observed_until_gone(backend, handle := _submit(backend))
    assert seen.phase is AttemptPhase.SUCCEEDED
    assert seen.termination is not None
    assert seen.termination.message == "node 0: trained to the end"
    assert seen.progress is not None
    assert seen.progress.step == 2
    assert wait_for(backend.collect(ref_to(handle))) == [
        f"file://{folder}/runs/default/tiny/output"
    ]


@pytest.mark.parametrize("code", [1, 65, 75, 78, 93])
def test_the_exit_code_is_reported_as_it_is(folder: Path, code: int) -> None:
    backend = local_backend(folder, {"1": {"steps": 1, "exit_code": code, "is_silent": True}})
    seen = observed_until_gone(backend, _submit(backend))
    assert seen.phase is AttemptPhase.FAILED
    assert seen.termination is not None
    assert seen.termination.exit_code == code


@pytest.mark.parametrize("code", [130, 143])
def test_a_process_told_to_stop_before_it_could_listen_is_preempted(
    folder: Path, code: int
) -> None:
    backend = local_backend(folder, {"1": {"exit_code": code, "fail_at": 1, "is_silent": True}})
    seen = observed_until_gone(backend, _submit(backend))
    assert seen.phase is AttemptPhase.FAILED
    assert seen.termination is not None
    assert verdict(seen).failure_class is FailureClass.PREEMPTED
    assert seen.termination.exit_code == code


def test_a_killed_main_process_is_a_lost_worker(folder: Path) -> None:
    backend = local_backend(folder, {"1": {"steps": 1000}})
    handle = _submit(backend)
    os.kill(_main_pid(folder), signal.SIGKILL)
    seen = observed_until_gone(backend, handle)
    assert seen.termination is not None
    assert (seen.termination.exit_code, seen.termination.failure_class) == (
        137,
        FailureClass.WORKER_LOST,
    )
    assert seen.message == "node 0 was killed (SIGKILL) without a termination message"


def test_an_exit_code_that_contradicts_the_last_words_wins(folder: Path) -> None:
    backend = local_backend(folder, {"1": {"steps": 1000}})
    handle = _submit(backend)
    words = folder / "runs/default/tiny/attempts/1/node-0.termination.json"
    words.write_text('{"failureClass": "Completed", "exitCode": 0, "message": "all is well"}')
    os.kill(_main_pid(folder), signal.SIGKILL)
    seen = observed_until_gone(backend, handle)
    assert seen.phase is AttemptPhase.FAILED
    assert seen.termination is not None
    assert seen.termination.failure_class is not FailureClass.COMPLETED
    assert "137 after its message: all is well" in seen.termination.message


def test_a_lost_node_fails_the_attempt_and_is_gone_only_with_the_others(folder: Path) -> None:
    backend = local_backend(folder, {"1": {"steps": 1000}})
    handle = _submit(backend, topology={"nodes": 2})
    os.kill(_main_pid(folder, node=1), signal.SIGKILL)
    wait_until(lambda: wait_for(backend.observe(ref_to(handle))).phase is AttemptPhase.FAILED)
    seen = wait_for(backend.observe(ref_to(handle)))
    assert (seen.all_gone, seen.nodes_ready, seen.node) == (False, 1, "node-1")
    wait_for(backend.cancel(ref_to(handle), after(10.0)))
    seen = observed_until_gone(backend, handle)
    assert seen.node == "node-1"
    assert not is_running(_main_pid(folder, node=0))


def test_a_deaf_process_is_killed_after_the_grace_also_by_another_caller(folder: Path) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    time = [start]
    plays = {"1": {"steps": 10_000, "is_deaf": True}}
    backend = local_backend(folder, plays, now=lambda: time[0])
    handle = _submit(backend)
    wait_until(lambda: starts(folder) == [(1, 0)])
    wait_for(backend.cancel(ref_to(handle), start + timedelta(seconds=60)))
    restarted = local_backend(folder, plays, now=lambda: time[0])
    time[0] = start + timedelta(seconds=30)
    later = start + timedelta(seconds=90)  # only an earlier time would count
    wait_for(restarted.cancel(ref_to(handle), later))
    time[0] = start + timedelta(seconds=59)
    assert not wait_for(restarted.observe(ref_to(handle))).all_gone
    time[0] = start + timedelta(seconds=60)
    seen = observed_until_gone(restarted, handle)
    assert seen.termination is not None
    assert seen.termination.exit_code == 137
    assert seen.message == "node 0 was killed 60 s after it was asked to stop"


def test_what_a_node_leaves_behind_is_ended_before_it_counts_as_gone(folder: Path) -> None:
    backend = local_backend(folder, {"1": {"steps": 1000, "has_stray": True}})
    handle = _submit(backend)
    note = folder / "runs/default/tiny/stray.txt"
    wait_until(lambda: note.exists() and bool(note.read_text()))
    stray = int(note.read_text())
    assert is_running(stray)
    os.kill(_main_pid(folder), signal.SIGKILL)
    observed_until_gone(backend, handle)
    assert not is_running(stray)


def _submit_two_nodes(folder: Path, steps: int) -> Handle:
    backend = local_backend(folder, {"*": {"steps": steps}})
    request = backend.render(planned(topology={"nodes": 2}), Attempt(1))
    return wait_for(backend.submit(request))


def test_nodes_meet_at_a_port_that_the_kernel_gives_nobody(folder: Path) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    _submit_two_nodes(folder, steps=1)
    record = json.loads((folder / "runs/default/tiny/attempts/1/attempt.json").read_text())
    assert int(record["rendezvous"].partition(":")[2]) < lowest


def test_an_orphan_that_ended_unseen_is_known_by_its_last_words(folder: Path) -> None:
    assert not run_and_kill(lambda: _submit_two_nodes(folder, steps=1), 10_000)
    words = folder / "runs/default/tiny/attempts/1"
    wait_until(lambda: all((words / f"node-{n}.termination.json").exists() for n in (0, 1)))
    handle = _submit_two_nodes(folder, steps=1)
    seen = observed_until_gone(local_backend(folder), handle)
    assert seen.phase is AttemptPhase.SUCCEEDED
    assert starts(folder) == [(1, 0), (1, 1)]


def test_an_orphan_that_is_gone_without_a_word_was_killed(folder: Path) -> None:
    assert not run_and_kill(lambda: _submit_two_nodes(folder, steps=1000), 10_000)
    wait_until(lambda: len(starts(folder)) == 2)
    handle = _submit_two_nodes(folder, steps=1000)
    for node in (0, 1):
        os.kill(_main_pid(folder, node), signal.SIGKILL)
    seen = observed_until_gone(local_backend(folder), handle)
    assert seen.termination is not None
    assert seen.termination.failure_class is FailureClass.WORKER_LOST


def _survives_a_kill(folder: Path, event: int) -> bool:
    """Kill a submit before its file event, submit again; False when it came to its end before."""
    folder.mkdir()
    was_killed = run_and_kill(lambda: _submit_two_nodes(folder, steps=1000), event)
    handle = _submit_two_nodes(folder, steps=1000)
    wait_until(lambda: len(starts(folder)) >= 2)
    wait_for(local_backend(folder).cancel(ref_to(handle), after(0.0)))
    observed_until_gone(local_backend(folder), handle)
    assert starts(folder) == [(1, 0), (1, 1)], f"killed before event {event}"
    return was_killed


def test_a_submit_killed_before_any_file_event_starts_each_node_exactly_once(
    tmp_path: Path,
) -> None:
    event = 0
    while _survives_a_kill(tmp_path / str(event), event):
        event += 1
    assert event > 10


def test_the_token_reaches_the_process_and_no_file(folder: Path) -> None:
    secret = "hf_not_for_files"
    environ = {"HF_TOKEN": secret, "RANK": "3", "AWS_SECRET_ACCESS_KEY": "other"}
    backend = local_backend(folder, {"1": {"steps": 1000}}, environ)
    handle = _submit(backend)
    wait_until(lambda: starts(folder) == [(1, 0)])
    process = Path(f"/proc/{_main_pid(folder)}/environ").read_text()
    assert f"HF_TOKEN={secret}" in process
    assert "\0RANK=" not in process
    assert "AWS_SECRET_ACCESS_KEY" not in process
    wait_for(backend.cancel(ref_to(handle), after(0.0)))
    observed_until_gone(backend, handle)  # else files come and go while they are read
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert texts
    assert not any(secret in text for text in texts)


def test_variables_of_trackers_reach_node_0_of_a_job_that_has_them_and_no_file(
    folder: Path,
) -> None:
    secret = "wandb_not_for_files"
    environ = {"WANDB_API_KEY": secret, "MLFLOW_TRACKING_TOKEN": secret}
    trackers = [{"type": "wandb", "project": "p"}]
    backend = local_backend(folder, {"1": {"steps": 1000}}, environ)
    plan = planned(topology__nodes=2, observability={"trackers": trackers})
    handle = wait_for(backend.submit(backend.render(plan, Attempt(1))))
    wait_until(lambda: starts(folder) == [(1, 0), (1, 1)])
    first, second = (
        Path(f"/proc/{_main_pid(folder, node)}/environ").read_text() for node in (0, 1)
    )
    assert f"WANDB_API_KEY={secret}" in first
    assert "MLFLOW_" not in first
    assert secret not in second
    wait_for(backend.cancel(ref_to(handle), after(0.0)))
    observed_until_gone(backend, handle)  # else files come and go while they are read
    assert not any(secret in path.read_text() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def changing() -> Iterator[int]:
    """A process that replaces its program all the time, and its environment with it."""
    again = 'exec sh -c "$1" sh "$1"'
    with subprocess.Popen(["sh", "-c", again, "sh", again], env={"CHANGING": "program"}) as process:
        yield process.pid
        process.kill()


def test_a_process_is_seen_while_it_changes_its_program(changing: int) -> None:
    for look in range(300):
        found = proc.marked("CHANGING", "program")
        assert [process.pid for process in found] == [changing], f"look {look}"


def test_logs_show_the_nodes_output_until_the_rank_writes_its_own(folder: Path) -> None:
    backend = local_backend(folder, {"1": {"steps": 1}})
    handle = _submit(backend)
    observed_until_gone(backend, handle)

    async def read() -> list[str]:
        return [line async for line in backend.logs(ref_to(handle), 0, follow=True)]

    assert asyncio.run(read()) == ["node 0 of attempt 1 starts at step 0"]
    logs = folder / "runs/default/tiny/logs"
    event = '{{"time": 0, "attempt": {}, "rank": 0, "event": "step", "loss": {}}}\n'
    for name, text in (
        (".", event.format(7, 7.0) + event.format(1, 0.25)),  # as release 0.1.0 writes it
        ("attempt-1.2", event.format(1, 0.125)),
        ("attempt-1.10", event.format(1, 0.0625)),
        ("attempt-11.1", event.format(11, 11.0)),
    ):
        (logs / name).mkdir(parents=True)
        (logs / name / "rank-0.jsonl").write_text(text)
    lines = asyncio.run(read())
    assert [line.partition("loss=")[2] for line in lines] == ["0.25", "0.125", "0.0625"]
