"""Real ranks under a real supervisor: how each way to end becomes one exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from finetune_trainer.config import Termination
from support.launch.journals import journals_in
from support.launch.launches import Launch, clean_environment, is_alive, train_config, until

# Generous against a busy machine, and far below the 3 s a hung rank has, plus torch's 30 s.
PROMPTLY_SECONDS = 20


@pytest.fixture
def started(start, tmp_path: Path):
    """Start a supervisor of this entry, in this environment and with these settings."""

    def started(entry: str, environ: dict[str, str] | None = None, **changes: object) -> Launch:
        return start(train_config(tmp_path, **changes), entry, environ)

    return started


def test_ranks_that_finish_exit_with_0_and_rank_0_has_the_last_word(
    started, tmp_path: Path
) -> None:
    folder, last_words = tmp_path / "tmp", tmp_path / "other.json"
    folder.mkdir()
    environ = {"TMPDIR": str(folder), "FINETUNE_TERMINATION_PATH": str(last_words)}
    run = started("finish", environ | {"FINETUNE_VOLUMES": f"/mnt:{tmp_path}"})
    assert run.wait() == 0, run.stderr
    termination = Termination.read(last_words)
    assert termination.message == "rank 0 of 2, sum 2"
    assert termination.progress is not None
    assert termination.progress.phase == "Done"
    assert [run.events(rank)[-1]["event"] for rank in (0, 1)] == ["ended", "ended"]
    assert not Path(run.config.termination_path).exists(), "the environment names another file"
    assert list(folder.iterdir()) == [], "nothing is left in the temporary folder"
    for rank in (0, 1):
        (seen,) = [event for event in run.events(rank) if event["event"] == "folder"]
        assert Path(seen["path"]).is_relative_to(folder), "the ranks of a pod start in a folder"
        assert seen["files"] == [], "without files"


@pytest.mark.parametrize(
    ("act", "code", "failure_class"),
    [
        ("data", 65, "DataError"),
        ("sigkill", 137, "WorkerLost"),
    ],
)
def test_one_failing_rank_decides_and_ends_the_others(
    started, act: str, code: int, failure_class: str
) -> None:
    run = started("act", {"ACT": act, "ACT_RANK": "1"})
    assert run.wait() == code, run.stderr
    last_words = run.termination
    assert (last_words.exit_code, last_words.failure_class) == (code, failure_class)
    assert last_words.rank == 1
    assert run.stderr.splitlines()[-1] == f"{failure_class}: {last_words.message}"


def test_a_rank_that_nccl_aborts_at_a_timeout_is_hung(started) -> None:
    run = started("act", {"ACT": "nccl-timeout", "ACT_RANK": "1"})
    assert run.wait() == 1, run.stderr
    last_words = run.termination
    assert (last_words.failure_class, last_words.rank) == ("Hung", None), "one of the others hangs"
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78)" in last_words.message
    assert "what():" in run.stderr, "what ranks write is passed on"


@pytest.mark.full
def test_a_rank_that_stays_away_from_a_collective_makes_the_attempt_hung(started) -> None:
    run = started("stay_away", control={"collective_timeout_seconds": 5})
    assert run.wait() == 1, run.stderr
    last_words = run.termination
    assert (last_words.failure_class, last_words.rank) == ("Hung", None)
    assert "did not enter a collective" in last_words.message


def test_a_kernel_that_cannot_be_deterministic_ends_the_run_by_the_field(started) -> None:
    run = started("need_a_kernel", training={"deterministic": True})
    assert run.wait() == 78, run.stderr
    assert run.termination.message.startswith("spec.training.deterministic is not possible: ")


def test_sigterm_lets_all_ranks_leave_at_the_same_step_with_75(started) -> None:
    run = started("train")
    ranks = run.pids_of_ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    messages = [run.events(rank)[-1]["termination"]["message"] for rank in (0, 1)]
    assert messages[0] == messages[1] == run.termination.message
    assert run.termination.checkpoint is not None
    assert not any(map(is_alive, ranks))


@pytest.mark.full
def test_sigterm_to_a_single_rank_makes_all_of_them_leave(started) -> None:
    run = started("train")
    os.kill(run.pids_of_ranks()[1], signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    steps = [run.events(rank)[-1]["termination"]["step"] for rank in (0, 1)]
    assert steps[0] == run.termination.step > 0
    last_step = [e["step"] for e in run.events(1) if e["event"] == "step"][-1]
    assert last_step == steps[0]


@pytest.mark.full
def test_a_rank_that_needs_longer_than_the_other_is_waited_for(started) -> None:
    run = started("leave_late")
    run.pids_of_ranks()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 75, run.stderr
    assert run.events(1)[-1]["event"] == "ended"


@pytest.mark.full
def test_ranks_that_do_not_leave_are_killed_after_the_grace_period(started) -> None:
    run = started("train_on", termination_grace_seconds=1)
    ranks = run.pids_of_ranks()
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 137, run.stderr
    assert 1 <= time.monotonic() - asked < PROMPTLY_SECONDS
    assert "grace" in run.termination.message
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_killed_rank_is_named_and_the_others_are_gone_promptly(started, victim: int) -> None:
    run = started("train")
    ranks = run.pids_of_ranks()
    killed = time.monotonic()
    os.kill(ranks[victim], signal.SIGKILL)
    assert run.wait() == 137, run.stderr
    assert time.monotonic() - killed < PROMPTLY_SECONDS
    assert not any(map(is_alive, ranks))
    last_words = run.termination
    assert (last_words.failure_class, last_words.rank) == ("WorkerLost", victim)
    assert last_words.step > 0


def test_the_ranks_of_a_killed_supervisor_die_with_it(started) -> None:
    run = started("train")
    ranks = run.pids_of_ranks()
    run.process.kill()
    until(lambda: not any(map(is_alive, ranks)), timeout=PROMPTLY_SECONDS)
    assert run.wait() == -signal.SIGKILL


@pytest.mark.full
def test_a_stopped_rank_does_not_keep_its_failed_peers_supervisor_waiting(started) -> None:
    run = started("train")
    ranks = run.pids_of_ranks()
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(PROMPTLY_SECONDS) == 137
    assert run.termination.rank == 1
    assert not is_alive(ranks[0])


def test_a_stop_before_training_began_is_a_free_restart(started) -> None:
    run = started("train")
    until(lambda: bool(journals_in(Path(run.config.run_dir))))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.stderr


@pytest.mark.full
def test_sigterm_to_a_single_rank_before_training_began_ends_all_of_them(started) -> None:
    run = started("train")
    until(lambda: bool(journals_in(Path(run.config.run_dir))))
    ranks = {int(p.environ()["RANK"]): p.pid for p in psutil.Process(run.process.pid).children()}
    until(lambda: handles_sigterm(ranks[1]))
    os.kill(ranks[1], signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    assert not any(map(is_alive, ranks.values()))


def handles_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM by now."""
    fields = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(fields["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.full
def test_one_process_needs_no_peers(started) -> None:
    run = started("finish", world={"nproc_per_node": 1})
    assert run.wait() == 0, run.stderr
    assert run.termination.message == "rank 0 of 1, sum 1"


def main_process(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "finetune_trainer", *arguments],
        env=clean_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_problem_of_a_configuration_is_a_sentence_and_the_exit_code_78(
    tmp_path: Path,
) -> None:
    path, last_words = tmp_path / "config.json", tmp_path / "last.json"
    good = train_config(tmp_path).to_json()
    path.write_text(good.replace('"method"', '"methd"'))
    done = main_process(str(path), FINETUNE_TERMINATION_PATH=str(last_words))
    assert done.returncode == 78
    lines = done.stderr.splitlines()
    assert {"method: Field required", "methd: Extra inputs are not permitted"} <= set(lines)
    text = last_words.read_text()
    assert "methd: Extra inputs are not permitted" in text
    assert '"failureClass":"ConfigError"' in text


def test_last_words_go_where_an_unusable_configuration_says(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = train_config(tmp_path)
    path.write_text(config.to_json().replace('"method"', '"methd"'))
    assert main_process(str(path)).returncode == 78
    assert Path(config.termination_path).exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(None, "cannot be read (No such file or directory)", id="missing"),
        pytest.param("{", "Invalid JSON", id="not JSON"),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_file(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    done = main_process(str(path))
    assert done.returncode == 78
    assert str(path) in done.stderr
    assert sentence in done.stderr


def test_a_setting_that_is_refused_is_named_as_in_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = train_config(tmp_path).to_json()
    path.write_text(
        text.replace('"type": "ddp",', '"type": "zero3",').replace(
            '"offload": "none"', '"offload": "nvme"'
        )
    )
    done = main_process(str(path))
    assert done.returncode == 78
    assert done.stderr == (
        "ConfigError: spec.strategy.offload nvme needs spec.strategy.nvmePath, the folder of its "
        "files\n"
    )


def test_a_call_without_a_configuration_explains_itself() -> None:
    done = main_process()
    assert (done.returncode, done.stderr) == (78, "usage: python -m finetune_trainer CONFIG\n")
