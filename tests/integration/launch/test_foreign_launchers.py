"""The trainer under other launchers: the termination message tells how a run ends.

Their exit codes are their own: torchrun turns every failure into 1.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from finetune_trainer.config import Termination, TrainConfig
from support.launch.journals import journals_in
from support.launch.launches import (
    MAIN,
    clean_environment,
    free_port,
    is_alive,
    train_config,
    until,
)

SCRIPTS = Path(sys.executable).parent


class Job:
    """A run of stand-in ranks: the processes of one launcher, or each rank started alone."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.processes: list[subprocess.Popen[str]] = []
        self.said = ""

    def start(self, command: list[str], entry: str, environ: Mapping[str, str]) -> None:
        path = Path(self.config.termination_path).parent / "config.json"
        path.write_text(self.config.to_json())
        process = subprocess.Popen(
            [*command, str(MAIN), str(path), entry],
            # What torchrun and accelerate warn of is theirs.
            env=clean_environment(PYTHONWARNINGS="default", **environ),
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)

    def wait(self) -> list[int]:
        """Return the exit codes."""
        for process in self.processes:
            self.said += process.communicate(timeout=120)[1]
        return [process.returncode for process in self.processes]

    @property
    def end(self) -> tuple[int, str]:
        """Exit code and failure class in the termination message."""
        termination = Termination.read(Path(self.config.termination_path))
        return termination.exit_code, termination.failure_class

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, once each has finished a step."""
        paths = [Path(self.config.run_dir) / f"pid-{rank}" for rank in (0, 1)]
        until(lambda: all(path.exists() and path.read_text() for path in paths))
        return [int(path.read_text()) for path in paths]


def azure_ml(job: Job, entry: str, environ: Mapping[str, str]) -> None:
    port = str(free_port())
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        job.start([sys.executable], entry, {**environ, **place, **address})


def torchrun(job: Job, entry: str, environ: Mapping[str, str]) -> None:
    command = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node=2"]
    job.start(command, entry, environ)


def accelerate(job: Job, entry: str, environ: Mapping[str, str]) -> None:
    command = [str(SCRIPTS / "accelerate"), "launch", "--multi_gpu", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    job.start([*command, f"--main_process_port={free_port()}"], entry, environ)


def mpirun(job: Job, entry: str, environ: Mapping[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    job.start(command, entry, environ)


Launcher = Callable[[Job, str, Mapping[str, str]], None]


def launchers(*others: Launcher) -> pytest.MarkDecorator:
    """Run the test under torchrun and, in `make test-all`, under others.

    accelerate starts ranks by torchrun's agent, and `test_readme.py` runs the trainer to its end
    under each launcher of the page.
    """
    full = [pytest.param(one, marks=pytest.mark.full) for one in others]
    return pytest.mark.parametrize("launcher", [torchrun, *full])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    # Under mpirun the uid says which port ranks meet at: tests run beside each other.
    job = Job(train_config(tmp_path, job={"uid": str(uuid.uuid4())}))
    yield job
    for process in job.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@launchers()
def test_ranks_that_finish_make_the_launcher_exit_with_0(job: Job, launcher: Launcher) -> None:
    launcher(job, "finish", {})
    assert set(job.wait()) == {0}, job.said
    assert job.end == (0, "Completed")
    assert "Completed: rank 0 of 2, sum 2" in job.said


@pytest.mark.full
@launchers(azure_ml, accelerate, mpirun)
def test_sigterm_lets_the_ranks_leave_with_a_checkpoint(job: Job, launcher: Launcher) -> None:
    launcher(job, "train", {})
    ranks = job.ranks()
    job.processes[-1].terminate()  # of Azure ML's processes one is enough
    codes = job.wait()
    assert set(codes) == ({75} if launcher is azure_ml else {codes[0]}), job.said
    assert codes[0] != 0
    assert job.end == (75, "Preempted"), job.said
    assert Termination.read(Path(job.config.termination_path)).checkpoint is not None
    until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.full
@launchers(mpirun)
def test_the_rank_that_is_to_blame_has_the_last_word(job: Job, launcher: Launcher) -> None:
    launcher(job, "act", {"ACT": "data", "ACT_RANK": "1"})
    assert 0 not in job.wait(), job.said
    assert job.end == (65, "DataError"), job.said
    assert Termination.read(Path(job.config.termination_path)).rank == 1


def test_the_rank_that_is_to_blame_corrects_what_rank_0_has_said(job: Job) -> None:
    azure_ml(job, "blame_late", {})
    assert 0 not in job.wait(), job.said
    assert job.end == (65, "DataError"), job.said
    assert "WorkerLost: rank 1 has ended with an error" in job.said


def test_mpiruns_variables_are_enough(job: Job) -> None:
    for rank in ("0", "1"):
        place = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
        environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
        job.start([sys.executable], "finish", environ)
    assert job.wait() == [0, 0], job.said
    assert job.end == (0, "Completed")


def lone_accelerate(job: Job, entry: str, *arguments: str) -> None:
    command = [str(SCRIPTS / "accelerate"), "launch", "--cpu", "--num_machines=1", *arguments]
    job.start([*command, "--mixed_precision=no", "--dynamo_backend=no"], entry, {})


@pytest.mark.full
def test_the_single_process_that_accelerate_starts_for_two_on_cpus_is_refused(job: Job) -> None:
    lone_accelerate(job, "finish", "--num_processes=2")
    assert job.wait() != [0]
    assert job.end == (93, "DoNotRestart"), job.said
    assert "accelerate launch started 1 rank(s), but the configuration requires 2" in job.said


@pytest.mark.full
def test_a_rank_leaves_when_accelerate_dies_without_telling_it(tmp_path: Path, job: Job) -> None:
    job.config = train_config(tmp_path, world={"nproc_per_node": 1})
    lone_accelerate(job, "train", "--num_processes=1")
    path = Path(job.config.run_dir) / "pid-0"
    until(lambda: path.exists() and path.read_text() != "")
    job.processes[0].terminate()
    assert job.wait() == [-signal.SIGTERM], job.said
    until(lambda: not is_alive(int(path.read_text())))
    assert job.end == (75, "Preempted")


def test_restarts_in_place_are_refused_where_nobody_would_make_them(
    tmp_path: Path, job: Job
) -> None:
    job.config = train_config(tmp_path, world={"nproc_per_node": 1, "restarts_in_place": 2})
    job.start([sys.executable], "finish", {"RANK": "0", "WORLD_SIZE": "1"})
    assert job.wait() == [78]
    assert "spec.restartPolicy.restartsInPlace 2 has no effect under another launcher" in job.said


def test_sigterm_before_the_ranks_have_met_is_a_free_restart(job: Job) -> None:
    """Rank 1 never comes; rank 0 waits for it, and must not do so for ever."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    job.start([sys.executable], "finish", {**place, "MASTER_PORT": str(free_port())})
    until(lambda: bool(journals_in(Path(job.config.run_dir))))
    os.kill(job.processes[0].pid, signal.SIGTERM)
    assert job.wait() == [75], job.said
    assert "asked to stop before training began; no work is lost" in job.said
