"""What `ftctl run` says of a job that is followed no longer, and the exit code for it."""

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from finetune_operator.backends.base import Handle
from finetune_operator.cli.conclusion import EXIT_STOPPED, conclude
from finetune_operator.cli.target import open_target
from finetune_operator.cli.view import view_of
from finetune_operator.reconcile.attempts import open_next, with_handle
from support.api.builders import manifest
from support.azureml.azureml_cases import ALLOW, JOB, SETTINGS

PROFILE = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneProfile",
    "metadata": {"name": "default"},
    "spec": {"azureml": dict(SETTINGS), "allow": dict(ALLOW)},
}
HANDLE = Handle("AzureMLJob", "tiny-1", "uid-1", "https://studio.test/tiny-1")


@pytest.mark.parametrize(
    ("opened", "handle", "expected"),
    [
        (False, None, "Stopped after 5s; there is no checkpoint yet"),
        (True, None, "tiny may be starting: the creation of attempt 1 has no response"),
        (True, HANDLE, "tiny continues: https://studio.test/tiny-1"),
    ],
    ids=["no attempt", "no answer to its submission", "it runs"],
)
def test_a_job_of_a_service_is_stopped_only_where_no_attempt_of_it_may_run(
    opened: bool, handle: Handle | None, expected: str, tmp_path: Path
) -> None:
    files = tmp_path / "job.yaml", tmp_path / "profile.yaml"
    for file, content in zip(files, (manifest(**JOB), PROFILE), strict=True):
        file.write_text(json.dumps(content))
    target, out = open_target(files[0], profile=files[1]), io.StringIO()
    status = target.job.status
    if opened:
        status = open_next(status, target.context.now())
    if handle is not None:
        status = with_handle(status, handle)
    job = target.job.model_copy(update={"status": status})
    console, again = Console(file=out, width=60), "ftctl run job.yaml"
    with pytest.raises(typer.Exit) as left:
        conclude(console, target, job, view_of(job, None), seconds=5, again=again)
    assert left.value.exit_code == EXIT_STOPPED
    first, *more = out.getvalue().strip().splitlines()
    assert first.startswith(expected)
    assert any(line.endswith("ftctl run job.yaml") for line in more)
