"""Settings from the environment, and lines of the log."""

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune_operator.kernel.health import Health
from finetune_operator.kernel.logs import JsonLine, TextLine
from finetune_operator.kernel.settings import Settings, SettingsError, read_settings


def test_settings_are_read_by_their_names_and_others_variables_are_not() -> None:
    made = read_settings(
        {
            "FINETUNE_OPERATOR_NAMESPACES": "team-a, team-b",
            "FINETUNE_OPERATOR_WORKERS": "4",
            "FINETUNE_OPERATOR_LOG_FORMAT": "json",
            "FINETUNE_OPERATOR_LOG_LEVEL": "debug",
            "FINETUNE_OPERATOR_LEASE_NAME": "team.leader",
            "FINETUNE_OPERATOR_KUBECONFIG": "",
            "HOME": "/root",
        }
    )
    assert made.namespaces == ("team-a", "team-b")
    assert (made.workers, made.log_format, made.kubeconfig) == (4, "json", None)
    assert (made.log_level, made.lease_name) == ("DEBUG", "team.leader")


def test_process_with_a_setting_that_cannot_be_used_ends_with_one_sentence() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "finetune_operator.kernel"],
        env={**os.environ, "FINETUNE_OPERATOR_LOG_LEVEL": "LOUD"},
        capture_output=True,
        text=True,
    )

    sentence = "'LOUD': input should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'\n"
    assert (ended.returncode, ended.stderr) == (1, f"FINETUNE_OPERATOR_LOG_LEVEL {sentence}")


def test_process_whose_health_pages_cannot_be_served_ends_with_one_sentence(
    tmp_path: Path,
) -> None:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {"KUBECONFIG": str(file), "HEALTH_HOST": "127.0.0.1", "HEALTH_PORT": port}
        ended = subprocess.run(
            [sys.executable, "-m", "finetune_operator.kernel"],
            env={**os.environ, **{f"FINETUNE_OPERATOR_{key}": one for key, one in given.items()}},
            capture_output=True,
            text=True,
        )

    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        1,
        f"/healthz cannot be served at 127.0.0.1, port {port}: address already in use; "
        "set FINETUNE_OPERATOR_HEALTH_PORT to a port that is free",
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        pytest.param("WORKRES", "4", "is not a setting", id="misspelt"),
        pytest.param("WORKERS", "many", "valid integer", id="no number"),
        pytest.param("RESYNC_SECONDS", "0", "greater than 0", id="out of bounds"),
        pytest.param("RENEW_DEADLINE_SECONDS", "20", "longer than the previous one", id="order"),
        pytest.param("RETRY_SECONDS", "60", "no shorter than the first", id="order of retries"),
        pytest.param("LOG_LEVEL", "LOUD", "'LOUD': input should be 'DEBUG'", id="no level"),
        pytest.param("LOG_FORMAT", "xml", "'text' or 'json'", id="no format"),
        pytest.param("NAMESPACES", "a,team_A", "'team_A': is not a valid namespace", id="no label"),
        pytest.param("NAMESPACES", "a" * 64, "up to 63", id="too long"),
        pytest.param("LEASE_NAME", "Bad_Name", "is not a valid Lease name", id="no name"),
        pytest.param("LEASE_NAME", "a..b", "is not a valid Lease name", id="no name between dots"),
        pytest.param(
            "LEASE_NAMESPACE", "a.b", "is not a valid namespace name", id="a dot too many"
        ),
    ],
)
def test_what_cannot_be_used_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_settings({f"FINETUNE_OPERATOR_{name}": value})


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def record(
    message: str, raised: BaseException | None = None, **fields: object
) -> logging.LogRecord:
    info = (type(raised), raised, raised.__traceback__) if raised else None
    made = logging.LogRecord("kernel", logging.INFO, "", 0, message, (), info)
    made.created = 0.25
    vars(made).update(fields)
    return made


def test_a_line_of_text_holds_its_fields_and_stays_one_line() -> None:
    line = TextLine().format(record("look\nfailed", job="ns/a", error="no answer", empty=""))
    assert line == (
        '1970-01-01T00:00:00.250Z INFO look\\nfailed job=ns/a error="no answer" empty=""'
    )


def test_a_line_of_json_holds_its_fields_and_the_traceback() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        error = sys.exc_info()[1]
    line = JsonLine().format(record("reconcile failed", error, job="ns/a"))
    assert "\n" not in line
    made = json.loads(line)
    assert made.pop("exception").endswith("ValueError: wrong")
    assert made == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "kernel",
        "message": "reconcile failed",
        "job": "ns/a",
    }


def test_of_a_request_that_kopf_makes_again_and_again_only_the_first_failure_is_told() -> None:
    code = """
import logging, sys
from finetune_operator.kernel.logs import set_up
from finetune_operator.kernel.settings import LogFormat, LogLevel
set_up(LogFormat.TEXT, LogLevel.INFO, logging.StreamHandler(sys.stdout))
import kopf
from kopf._cogs.clients.watching import logger
for number in (1, 2, 10):
    logger.error(f"Request attempt #{number} failed; will retry: GET /x -> TimeoutError()")
logger.error("something else")
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [line.split(" ERROR ")[1] for line in shown.stdout.splitlines()]
    assert told == [
        "Request attempt #1 failed; will retry: GET /x -> TimeoutError()",
        "something else",
    ]


def test_a_process_is_alive_as_long_as_its_work_moves() -> None:
    health = Health(oldest_seconds=20, silent_seconds={"pods": 10, "jobs.batch": 400})
    assert health.complaints(300) == ["the watch of jobs.batch has not progressed for 400 s"]
    assert health.complaints(15) == [
        "a job has not progressed for 20 s",
        "the watch of jobs.batch has not progressed for 400 s",
    ]
    assert health.complaints(1000) == []
