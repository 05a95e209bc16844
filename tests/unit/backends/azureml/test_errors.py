"""What an error of Azure means: try again, somebody must act, or there is no such thing."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from azureml_service import WORKSPACE, ServiceClient
from finetune_operator.backends.azureml.polling import Poller
from finetune_operator.backends.azureml.sdk import RefusedError, translated_errors
from finetune_operator.backends.azureml.submit import submit
from finetune_operator.backends.azureml.workspace_client import (
    REQUESTS_PER_SECOND,
    Azure,
    Workspace,
)
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.errors import BackendError, TransientError
from finetune_operator.kube.cache import Key
from finetune_operator.testing.suite import Lent
from support.azureml.azureml_cases import CASES

exceptions = pytest.importorskip("azure.core.exceptions", reason="needs the extra azureml")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")

ELSEWHERE = WORKSPACE.replace("/workspaces/", "/workspaces/not-")
PARENT = "Can not perform requested operation on nested resource. Parent resource 'w' not found."
RESOURCE = "The Resource 'Microsoft.MachineLearningServices/workspaces/w' was not found."
NESTED = "The Resource 'Microsoft.MachineLearningServices/workspaces/w/jobs/j' was not found."


def told(error: Exception) -> BackendError:
    """Return what is raised for an error of the SDK."""
    with pytest.raises(BackendError) as raised, translated_errors():
        raise error
    return raised.value


def http(status: int | None, code: str = "", message: str = "it says so") -> Any:
    """Return an error of an answer."""
    error = exceptions.HttpResponseError(message)
    error.status_code = status
    if code:
        error.error = exceptions.ODataV4Format({"code": code, "message": message})
    return error


@pytest.mark.parametrize(
    ("code", "message", "status"),
    [
        ("UserError", "Run tiny-1 was not found", 404),
        ("ResourceNotFound", NESTED, 404),
        pytest.param("", "Not Found", 0, id="of a proxy"),
        ("SubscriptionNotFound", "The subscription 's' could not be found.", 0),
        ("ResourceGroupNotFound", "Resource group 'g' could not be found.", 0),
        ("ParentResourceNotFound", PARENT, 0),
        ("ResourceNotFound", RESOURCE, 0),
    ],
)
def test_a_404_about_the_workspace_is_none_about_the_job(
    code: str, message: str, status: int
) -> None:
    error = told(http(404, code, message))
    assert isinstance(error, RefusedError)
    assert error.status == status
    assert str(error) == f"Azure ML reports: {message}"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(http(429), id="throttled"),
        pytest.param(http(503), id="not available"),
        pytest.param(http(200), id="an answer that broke off"),
        pytest.param(exceptions.ServiceResponseError("gone"), id="no answer"),
        pytest.param(exceptions.ServiceRequestError("refused"), id="no connection"),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert isinstance(told(error), TransientError)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(http(400), id="bad request"),
        pytest.param(http(403), id="no right"),
        pytest.param(http(None), id="no identity"),
        pytest.param(FileNotFoundError("/var/run/token"), id="no token file"),
        pytest.param(KeyError("api"), id="an answer without what it is asked for"),
    ],
)
def test_what_does_not_pass_is_refused(error: Exception) -> None:
    assert not told(error).retryable


@pytest.mark.parametrize(
    ("script", "may_pass"),
    [
        pytest.param("sleep 20", True, id="too slow"),
        pytest.param("echo 'Max retries: HTTPSConnectionPool' >&2; exit 1", True, id="no network"),
        pytest.param("echo 'Please run az login' >&2; exit 1", False, id="not logged in"),
        pytest.param("echo 'AADSTS700082: it has expired' >&2; exit 1", False, id="expired"),
        pytest.param(None, False, id="not installed"),
    ],
)
@pytest.mark.parametrize("is_later", [False, True])
def test_a_login_that_is_missing_is_told_from_one_that_cannot_be_had_now(
    is_later: bool,
    script: str | None,
    may_pass: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from azure.identity import DefaultAzureCredential

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if script else str(tmp_path))
    monkeypatch.delenv("AZURE_FEDERATED_TOKEN_FILE", raising=False)
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    cli = tmp_path / "az"
    token = {"accessToken": "a", "expires_on": 2**31}
    cli.write_text(f"#!/bin/sh\necho '{json.dumps(token)}'\n")
    cli.chmod(0o755)
    asked = DefaultAzureCredential(process_timeout=2)
    if is_later:  # then the SDK asks the CLI alone, whose errors are of another class
        asked.get_token("https://management.azure.com/.default")
    if script is None:
        cli.unlink()
    else:
        cli.write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(BackendError) as raised, translated_errors():
        asked.get_token("https://management.azure.com/.default")
    assert raised.value.retryable == may_pass


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(http(403, message="no: https:\\/\\/a.test\\/b?sig=secret"), id="refused"),
        pytest.param(http(503, message="no: https://a.test/b?sig=secret"), id="not now"),
        pytest.param(exceptions.ServiceRequestError("no: sig=secret"), id="no answer"),
        pytest.param(ValueError("no: sig=secret"), id="of the SDK"),
    ],
)
def test_no_error_tells_a_signature(error: Exception) -> None:
    said = str(told(error))
    assert "no: " in said
    assert "secret" not in said


def asked(work: Callable[[Workspace, Lent], Coroutine[Any, Any, Any]]) -> Any:
    """Return what `work` returns of a workspace that the service does not have."""

    async def inside() -> Any:
        lent, azure = Lent(), Azure({**os.environ, REQUESTS_PER_SECOND: "100"})
        azure.start(lent)
        return await work(azure.workspace(ELSEWHERE, None), lent)

    return asyncio.run(inside())


def test_in_a_workspace_that_is_not_seen_no_job_is_believed_to_be_missing(
    stand_in: ServiceClient,
) -> None:
    async def work(workspace: Workspace, lent: Lent) -> None:
        with pytest.raises(RefusedError, match="was not found") as refused:
            await workspace.job("tiny-1")
        assert refused.value.status == 0

    asked(work)


def test_in_a_workspace_that_is_not_seen_nothing_is_submitted(stand_in: ServiceClient) -> None:
    async def work(workspace: Workspace, lent: Lent) -> None:
        (job,) = CASES["amlcompute-one-node"].request().objects
        with pytest.raises(RefusedError):
            await submit(workspace, job)

    asked(work)
    assert not stand_in.requests("job.put")


def refusal(looks: Poller, ref: AttemptRef) -> BackendError | None:
    """Return why an attempt cannot be seen; None while it may still be."""
    try:
        looks.observe(ref)
    except TransientError:
        return None
    except BackendError as error:
        return error
    raise AssertionError("it was seen")


def test_an_attempt_in_a_workspace_that_is_not_seen_is_stalled_and_never_gone(
    stand_in: ServiceClient,
) -> None:
    async def work(workspace: Workspace, lent: Lent) -> None:
        looks = Poller(lambda ref: workspace, lambda: datetime.now(UTC))
        looks.start(lent)
        handle = Handle("AzureMLJob", f"{ELSEWHERE}/jobs/tiny-1", "uid-1")
        ref = AttemptRef(Key("default", "tiny"), "uid-1", 1, handle)
        looks.newest(ref)
        async with asyncio.timeout(30):
            while (refused := refusal(looks, ref)) is None:  # nothing was seen of it yet
                await asyncio.sleep(0.05)
        assert "was not found" in str(refused)
        assert stand_in.requests("job.get")
        await looks.close()

    asked(work)
