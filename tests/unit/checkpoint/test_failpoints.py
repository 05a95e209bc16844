"""A failpoint kills where it is told to, once, and does nothing anywhere else."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import finetune_trainer
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE, POINTS

REACH_BOTH = (
    "from finetune_trainer.failpoints import failpoint; "
    "failpoint('saving', 1); failpoint('saving', 2); failpoint('after-commit', 2)"
)


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    env = {**os.environ, **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_nothing_happens_without_the_variable() -> None:
    assert run(REACH_BOTH).returncode == 0


@pytest.mark.parametrize(
    ("wanted", "environ", "dies"),
    [
        pytest.param("saving", {}, True, id="any step"),
        pytest.param("saving@2", {}, True, id="a step that is reached"),
        pytest.param("saving@3", {}, False, id="a step that is not reached"),
        pytest.param("loading", {}, False, id="a place that is not reached"),
        pytest.param("saving:rank=1", {"RANK": "1"}, True, id="this rank"),
        pytest.param("saving@2:rank=1", {"RANK": "0"}, False, id="another rank"),
        pytest.param("saving:rank=1", {"OMPI_COMM_WORLD_RANK": "1"}, True, id="rank by mpirun"),
    ],
)
def test_the_process_dies_where_it_is_told(
    wanted: str, environ: dict[str, str], dies: bool
) -> None:
    done = run(REACH_BOTH, **{ENV_FAILPOINT: wanted}, **environ)
    assert done.returncode == (-signal.SIGKILL if dies else 0), done.stderr


def test_the_process_is_told_to_stop_where_that_is_asked_for() -> None:
    done = run(REACH_BOTH, **{ENV_FAILPOINT: "saving@2:rank=0:SIGTERM"})
    assert done.returncode == -signal.SIGTERM, done.stderr


def test_the_process_freezes_where_sigstop_is_requested() -> None:
    command = [sys.executable, "-c", REACH_BOTH]
    environ = {**os.environ, ENV_FAILPOINT: "saving@2:SIGSTOP"}
    with subprocess.Popen(command, env=environ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
    assert process.returncode == 0


def test_the_marker_file_lets_the_next_attempt_live(tmp_path: Path) -> None:
    environ = {ENV_FAILPOINT: "saving@2", ENV_FAILPOINT_ONCE: str(tmp_path / "killed")}
    codes = [run(REACH_BOTH, **environ).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]


@pytest.mark.parametrize(
    "wanted", ["savin", "saving@", "saving:rank=x", "saving@2@3", "saving:SIGHUP", " "]
)
def test_a_name_that_means_nothing_is_refused_with_the_list(wanted: str) -> None:
    done = run(REACH_BOTH, **{ENV_FAILPOINT: wanted})
    assert done.returncode == 1
    assert "ConfigError: FINETUNE_FAILPOINT" in done.stderr
    assert "before-publish" in done.stderr


def test_every_place_is_reached_by_the_trainer() -> None:
    source = Path(finetune_trainer.__file__).parent
    code = "".join(path.read_text() for path in source.rglob("*.py"))
    assert set(re.findall(r'\bfailpoint\("([a-z-]+)"', code)) == set(POINTS)
