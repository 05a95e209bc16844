"""A tracker gets every point of a journal, and a bad server costs one warning."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import TrackerConfig
from finetune_trainer.launch.journal_points import JournalPoints
from finetune_trainer.launch.trackers.mlflow_run import MlflowRun, MlflowServer
from finetune_trainer.launch.trackers.runner import Desk, Follower
from finetune_trainer.launch.trackers.tracker import End, NotAvailableError, RunFacts
from support.launch.launches import train_config, until
from support.launch.stand_in_mlflow import StandInMlflow, running_mlflow

SECRET = "s3cr3t-t0ken"


@pytest.fixture
def server() -> Iterator[StandInMlflow]:
    with running_mlflow() as running:
        yield running


def tracker(server: StandInMlflow, folder: Path, content: str = SECRET) -> TrackerConfig:
    (folder / "credentials").write_text(f"{content}\n")
    path = str(folder / "credentials")
    return TrackerConfig(type="mlflow", project="trial", url=server.address, credentials_path=path)


def facts(folder: Path) -> RunFacts:
    return RunFacts.of(train_config(folder), folder)


def write_steps(folder: Path, steps: range) -> None:
    lines = [
        {"event": "step", "step": step, "time": float(step), "loss": 1 / step, "grad_norm": 1.0}
        for step in steps
    ]
    journal = folder / "run/logs/attempt-1.1/rank-0.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def followed(
    open_tracker: Callable[[], Any], folder: Path, end: End = End.DONE, until_so: Any = None
) -> tuple[list[str], list[str]]:
    """Follow a journal to its end, and return the URLs and the warnings."""
    urls: list[str] = []
    warnings: list[str] = []
    journals = JournalPoints(train_config(folder), 0)
    follower = Follower(open_tracker, journals, opened=urls.append, warn=warnings.append)
    follower.start()
    if until_so is not None:
        until(until_so)
    follower.finish(end)
    follower.join(10)
    return urls, warnings


def test_every_point_reaches_mlflow_in_requests_that_it_accepts(
    server: StandInMlflow, tmp_path: Path
) -> None:
    server.token = SECRET
    write_steps(tmp_path, range(1, 701))
    open_run = partial(MlflowRun, tracker(server, tmp_path), facts(tmp_path))
    urls, warnings = followed(open_run, tmp_path)
    assert warnings == []
    assert urls == [f"{server.address}/#/experiments/1/runs/run-1"]
    (run,) = server.runs.values()
    assert [step for key, step, _ in run["metrics"] if key == "train/loss"] == [*range(1, 701)]
    assert (run["name"], run["status"]) == ("tiny", "FINISHED")
    assert run["params"]["learning_rate"] == "0.001"
    assert set(server.authorizations) == {f"Bearer {SECRET}"}


def test_user_and_password_are_basic_authentication(server: StandInMlflow, tmp_path: Path) -> None:
    server.token = f"me:{SECRET}"
    MlflowRun(tracker(server, tmp_path, server.token), facts(tmp_path))
    assert len(server.runs) == 1


def test_a_later_attempt_continues_the_run_and_a_step_may_come_again(
    server: StandInMlflow, tmp_path: Path
) -> None:
    open_run = partial(MlflowRun, tracker(server, tmp_path))
    write_steps(tmp_path, range(1, 6))
    followed(lambda: open_run(facts(tmp_path)), tmp_path, End.STOPPED)
    (run,) = server.runs.values()
    assert run["status"] == "KILLED"
    write_steps(tmp_path, range(4, 8))
    followed(lambda: open_run(facts(tmp_path)), tmp_path)
    assert [*server.runs.values()] == [run]
    assert run["status"] == "FINISHED"
    steps = [step for key, step, _ in run["metrics"] if key == "train/loss"]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7]


def test_a_server_that_refuses_costs_one_warning(server: StandInMlflow, tmp_path: Path) -> None:
    server.token = "another"
    write_steps(tmp_path, range(1, 3))
    open_run = partial(MlflowRun, tracker(server, tmp_path), facts(tmp_path))
    urls, warnings = followed(open_run, tmp_path, until_so=server.authorizations.copy)
    assert urls == []
    assert len(warnings) == 1
    assert warnings[0].startswith("HTTP 401")


def test_a_redirect_gets_no_credentials(server: StandInMlflow, tmp_path: Path) -> None:
    with running_mlflow() as other:
        server.redirects_to = other.address
        with pytest.raises(Exception, match="HTTP 307"):
            MlflowRun(tracker(server, tmp_path), facts(tmp_path))
        assert other.authorizations == []


def test_a_missing_secret_is_an_error_that_names_it(server: StandInMlflow, tmp_path: Path) -> None:
    config = tracker(server, tmp_path)
    (tmp_path / "credentials").unlink()
    with pytest.raises(NotAvailableError, match="the key that secretRef names cannot be read"):
        MlflowRun(config, facts(tmp_path))


def test_a_user_in_the_address_of_the_variable_is_not_part_of_the_page() -> None:
    environ = {"MLFLOW_TRACKING_URI": f"https://me:{SECRET}@mlflow.test/base/"}
    server = MlflowServer(TrackerConfig(type="mlflow", project="trial"), environ)
    assert server.address == "https://mlflow.test/base"


@pytest.mark.parametrize("address", ["", "file:///tmp/mlruns", "databricks", "http://"])
def test_an_address_that_is_no_server_is_refused(address: str) -> None:
    with pytest.raises(NotAvailableError, match="not the address of an MLflow server"):
        MlflowServer(
            TrackerConfig(type="mlflow", project="trial"), {"MLFLOW_TRACKING_URI": address}
        )


def test_a_warning_has_one_printable_line_without_secrets(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "credentials").write_text(f"me:{SECRET}")
    path = str(tmp_path / "credentials")
    one = TrackerConfig(type="mlflow", project="trial", credentials_path=path)
    Desk(None, lines.append).warn(one, f"Bearer {SECRET} is\x1b[31m wrong\nmore")
    assert lines == [
        "warning: tracker mlflow: Bearer *** is [31m wrong; its curves may be incomplete, and "
        "training continues"
    ]
