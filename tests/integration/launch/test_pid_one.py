"""Told to stop at any moment: the trainer as PID 1 of a container, started as a pod starts it.

Linux drops a signal to PID 1 that has no handler for it, and Python has none for its first moments.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from finetune_trainer.config import Termination, TrainConfig
from support.kubernetes.kubernetes_cases import Case
from support.launch.launches import clean_environment, train_config, until
from support.launch.tiny_run import write_inputs

CONTAINER = (
    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("env", "--default-signal"),  # as a container runtime starts it: no signal is ignored
)
MOMENTS = [0.005 * (3.0 / 0.005) ** (at / 39) for at in range(40)]
AT_ONCE = 3
"""How many run side by side; more only wait for each other."""


def why_not() -> str:
    """Return why no process can be PID 1 here; empty if one can."""
    try:
        done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip()


pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no process can be PID 1: {why_not()}")


def pod_command(*command: str, **profile: object) -> list[str]:
    """Return what a pod of a profile with this command runs."""
    case = Case(profile={"command": list(command), **profile})
    container = case.request().objects[-1]["spec"]["template"]["spec"]["containers"][0]
    return list(container["command"])


@dataclass
class Contained:
    """A container's first process, PID 1 to itself."""

    process: "subprocess.Popen[str]"
    pid: int

    def end(self, timeout: float) -> int | None:
        """Return the exit code of the container; None if it went on, and was killed."""
        try:
            self.said = self.process.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self.said = self.process.communicate()[1]
            return None
        return self.process.returncode


@contextmanager
def started(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[Contained]:
    """Start a container, whose own program has begun then; nothing of it is left behind."""
    with subprocess.Popen(
        [*CONTAINER, *command],
        env=clean_environment(**(environ or {})),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Contained(process, first_process(process))
        finally:
            process.kill()  # which kills what is inside


def first_process(container: "subprocess.Popen[str]") -> int:
    outside = psutil.Process(container.pid)
    while True:
        inside = outside.children()
        if inside and inside[0].name() not in ("unshare", "env"):
            return inside[0].pid
        assert container.poll() is None, container.communicate()[1]


def listens(process: int) -> bool:
    """Say whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def endless(inputs: Path, folder: Path) -> TrainConfig:
    """Return a run of one process that ends only when it is told to."""
    folder.mkdir()
    return train_config(
        folder,
        world={"nproc_per_node": 1},
        model={"path": str(inputs / "model")},
        data={"train": {"path": str(inputs / "train.jsonl")}, "max_seq_len": 64},
        method={"type": "lora", "lora": {"r": 4}},
        output={"format": "adapter"},
        training={"max_steps": 100_000},
    )


def stopped(inputs: Path, folder: Path, moment: float) -> int | None:
    """Tell a trainer to stop so long after its init listens, and return how its container ended.

    What comes in the milliseconds before that is lost, whatever the init's program is.
    """
    config = endless(inputs, folder / f"{moment:.4f}")
    path = folder / f"{moment:.4f}" / "config.json"
    path.write_text(config.to_json())
    *command, _ = pod_command(sys.executable, "-m", "finetune_trainer")
    with started([*command, str(path)]) as container:
        while not listens(container.pid):  # no sleep: the first moments matter
            assert container.process.poll() is None
        time.sleep(moment)
        os.kill(container.pid, signal.SIGTERM)
        code = container.end(timeout=120)  # its imports, beside other tests
    said = Path(config.termination_path)
    if code == 75:
        assert Termination.read(said).exit_code == 75
    else:
        assert not said.exists(), f"{code}: {said.read_text()}"
    return code


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_stop_is_heard_at_any_moment(inputs: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        codes = list(threads.map(partial(stopped, inputs, tmp_path), reversed(MOMENTS)))
    told = dict(zip(reversed(MOMENTS), codes, strict=True))
    assert {at: code for at, code in told.items() if code not in (75, 143)} == {}
    assert codes[0] == 75


SHELLS = [
    pytest.param(["dash"], id="dash"),
    pytest.param(["busybox", "sh"], id="busybox"),
    pytest.param(["bash", "--posix"], id="bash"),
]


def below(shell: Sequence[str], *command: str) -> list[str]:
    """Return what a pod runs, in an image where `sh` is that shell."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    sh, *lines = pod_command("sh", "-c", *command)
    assert sh == "sh"
    return [*shell, *lines]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("ends", "code"),
    [("exit 0", 0), ("exit 75", 75), ("kill -KILL $$", 137), ("kill -TERM $$", 143)],
)
def test_the_init_returns_what_its_command_ended_with(
    shell: Sequence[str], ends: str, code: int, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"  # it ends only then: what has ended before is nobody's first process
    with started(below(shell, f"until [ -e {seen} ]; do sleep 0.02; done; {ends}")) as container:
        seen.touch()
        assert container.end(30) == code


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_the_init_passes_every_wish_to_stop_on_and_waits(
    shell: Sequence[str], number: signal.Signals, tmp_path: Path
) -> None:
    told = "trap 'sleep 0.2; exit 75' TERM; : > began; while :; do sleep 0.02; done"
    with started(below(shell, f"cd {tmp_path}; {told}")) as container:
        until((tmp_path / "began").exists, timeout=30)
        for _ in range(3):  # the second and third while the command saves
            os.kill(container.pid, number)
        assert container.end(30) == 75, container.said


def test_the_init_reaps_what_its_command_leaves_behind(tmp_path: Path) -> None:
    # The first sleep is an orphan when its shell has ended, and ends before the command does.
    leaves = f"sh -c 'sleep 0.1 &'; sleep 0.5; : > {tmp_path}/1; sleep 60"
    with started(below(["dash"], leaves)) as container:
        until((tmp_path / "1").exists, timeout=30)
        init = psutil.Process(container.pid)
        until(lambda: [one.name() for one in init.children()] == ["sh"], timeout=30)
        os.kill(container.pid, signal.SIGTERM)
        assert container.end(30) == 143


NOWHERE = """\
apiVersion: v1
kind: Config
clusters: [{name: it, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: me, user: {}}]
contexts: [{name: here, context: {cluster: it, user: me}}]
current-context: here
"""


@pytest.mark.parametrize("moment", [0.0, 0.2, 0.5, 1.0])  # after it began to listen
def test_the_operator_ends_when_it_is_told_to_while_it_starts(
    tmp_path: Path, moment: float
) -> None:
    (tmp_path / "config").write_text(NOWHERE)
    settings = {
        "FINETUNE_OPERATOR_KUBECONFIG": str(tmp_path / "config"),
        "FINETUNE_OPERATOR_HEALTH_PORT": "0",
        "FINETUNE_OPERATOR_LEADER_ELECTION": "false",
    }
    with started([sys.executable, "-m", "finetune_operator.kernel"], settings) as container:
        until(lambda: listens(container.pid), timeout=30)
        time.sleep(moment)
        os.kill(container.pid, signal.SIGTERM)
        assert container.end(30) == 0, container.said
