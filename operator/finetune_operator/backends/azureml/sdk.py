"""Credentials, transport and error mapping of the Azure SDK, used by `workspace_client` in threads.

The SDK is imported on first use, because that takes a second and 100 MB.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from io import StringIO
from typing import Any

import yaml

from finetune_operator.backends.redaction import without_secrets
from finetune_operator.errors import BackendError, FineTuneError, TransientError

Json = dict[str, Any]
Check = Callable[[bool], None]  # called before each request, with whether it writes; may raise

INSTALL = "pip install 'finetune-operator[azureml]'"
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 15.0
# By default these loggers report each request, experimental features, and URLs, some of which are
# secrets.
_LOG_LEVELS = {"azure": logging.WARNING, "azure.ai.ml": logging.ERROR, "urllib3": logging.INFO}
# A 404 about the workspace or its parents, or from a proxy, does not show that the object is
# missing.
_ABOVE = re.compile(
    "(Subscription|ResourceGroup|ParentResource)NotFound|ResourceNotFound.*/workspaces/[^/']+'"
)
# Texts of the Azure CLI after a timeout or without a network; the exception class is the same as
# for a missing login.
_NO_LOGIN_NOW = re.compile("Failed to invoke|HTTPSConnectionPool")
_MAX = 400  # characters of a message


class RefusedError(BackendError):
    """Azure ML refuses a request, and will refuse it again until a person changes something.

    Attributes:
        status: HTTP status; 0 if no request was sent, or it is about the workspace itself.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def load() -> None:
    """Import the SDK, and limit its logging.

    Raises:
        RefusedError: The SDK cannot be imported.
    """
    try:
        import azure.ai.ml
        import azure.identity  # noqa: F401
    except ImportError as error:
        raise RefusedError(f"the Azure SDK cannot be imported ({error}); {INSTALL}") from error
    for name, level in _LOG_LEVELS.items():  # the import sets levels, too
        logging.getLogger(name).setLevel(level)


def credential(environ: Mapping[str, str], client_id: str | None, check: Check) -> Any:
    """Return the credential of an identity.

    Args:
        environ: Variables that workload identity sets in a pod; without them, the logged-in user,
            and the managed identity of the machine only if a client id names it.
        client_id: Client id of the identity; None for the operator's own.
        check: Called before each request for a token, which is read-only.

    Raises:
        RefusedError: The environment is incomplete.
    """
    from azure.identity import DefaultAzureCredential, WorkloadIdentityCredential

    client_id = client_id or environ.get("AZURE_CLIENT_ID") or None
    token_file = environ.get("AZURE_FEDERATED_TOKEN_FILE")
    if token_file is None:
        # Without a client id the chain would take the identity of the machine, which on a node of a
        # cluster is the kubelet's.
        return DefaultAzureCredential(
            managed_identity_client_id=client_id,
            exclude_managed_identity_credential=client_id is None,
        )
    tenant_id = environ.get("AZURE_TENANT_ID")
    if not client_id or not tenant_id:
        raise RefusedError(
            "AZURE_FEDERATED_TOKEN_FILE is set without AZURE_CLIENT_ID and AZURE_TENANT_ID; label "
            "the operator's pod for workload identity, or set the profile's azureml.clientId"
        )
    return WorkloadIdentityCredential(
        tenant_id=tenant_id,
        client_id=client_id,
        token_file_path=token_file,
        authority=environ.get("AZURE_AUTHORITY_HOST"),
        disable_instance_discovery=True,  # only the environment may name the authority
        retry_total=0,
        transport=_transport(lambda is_write: check(False)),
    )


def log_in(credential: Any) -> None:
    """Get a token, which later requests use, too; call it inside `translated_errors`."""
    credential.get_token(*_scopes())


class Sdk:
    """The SDK's clients of one workspace and identity, for several threads.

    Args:
        workspace_id: Azure's id of the workspace.
        credential: Credential of the identity.
        check: Called before each request.
    """

    def __init__(self, workspace_id: str, credential: Any, check: Check) -> None:
        self._workspace_id = workspace_id
        self._credential = credential
        self._check = check

    @cached_property
    def ml(self) -> Any:
        """The MLClient."""
        from azure.ai.ml import MLClient

        _, _, subscription, _, group, _, _, _, workspace = self._workspace_id.split("/")
        return MLClient(
            self._credential,
            subscription,
            group,
            workspace,
            retry_total=0,
            enable_telemetry=False,
            show_progress=False,
            transport=_transport(self._check),
        )

    def create(self, job: Mapping[str, Any]) -> Any:
        """Create a job that is written as for the CLI; one PUT."""
        from azure.ai.ml import load_job

        return self.ml.jobs.create_or_update(load_job(StringIO(yaml.safe_dump(dict(job)))))

    def send(
        self, method: str, url: str, params: Mapping[str, str] | None = None, body: Any = None
    ) -> Json:
        """Send a request that the SDK has no verb for, and return the response."""
        from azure.core.rest import HttpRequest

        asked = HttpRequest(method, url, params=dict(params or {}), json=body)
        (response := self._signed.send_request(asked)).raise_for_status()
        return dict(response.json()) if response.content else {}

    def read(self, url: str, start: int = 0, length: int | None = None) -> bytes:
        """Read a byte range from a signed URL without credentials; empty past the end.

        Args:
            url: May be a secret, so it appears in no log and no error.
            start: The first byte; a negative value counts from the end and costs one more request.
            length: Maximum number of bytes; None for all.

        Raises:
            TransientError: The range cannot be read.
        """
        if start < 0:
            size = self._part(url, "0-0").headers.get("Content-Range", "*/0").rpartition("/")[2]
            if not size.isdecimal():
                raise TransientError(f"the log has size {size}")
            start = max(0, int(size) + start)
        response = self._part(url, f"{start}-{'' if length is None else start + length - 1}")
        return b"" if response.status_code == 416 else bytes(response.content)

    def _part(self, url: str, byte_range: str) -> Any:
        from azure.core.exceptions import AzureError
        from azure.core.rest import HttpRequest

        request = HttpRequest("GET", url, headers={"Range": f"bytes={byte_range}"})
        try:
            response = self._unsigned.send_request(request)
        except AzureError as error:
            text = f"the log's URL does not respond ({type(error).__name__})"
            raise TransientError(text) from None
        if response.status_code >= 300 and response.status_code != 416:
            raise TransientError(f"the log's URL returned {response.status_code}")
        return response

    @cached_property
    def _signed(self) -> Any:
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy

        return self._pipeline(BearerTokenCredentialPolicy(self._credential, *_scopes()))

    @cached_property
    def _unsigned(self) -> Any:
        return self._pipeline()

    def _pipeline(self, *policies: Any) -> Any:
        from azure.core import PipelineClient

        return PipelineClient("", policies=[*policies], transport=_transport(self._check))


def _scopes() -> list[str]:
    from azure.core import AzureClouds
    from azure.core.settings import settings
    from azure.mgmt.core.tools import get_arm_endpoints

    cloud = settings.current.azure_cloud or AzureClouds.AZURE_PUBLIC_CLOUD
    return list(get_arm_endpoints(cloud)["credential_scopes"])


@contextmanager
def translated_errors() -> Iterator[None]:
    """Translate the SDK's exceptions.

    Raises:
        TransientError: A retry may succeed.
        RefusedError: A person must change something.
    """
    from azure.core import exceptions as azure

    try:
        yield
    except FineTuneError:
        raise
    except (azure.ServiceRequestError, azure.ServiceResponseError) as error:
        text = without_secrets(error.message, _MAX)
        raise TransientError(f"Azure ML does not respond ({text})") from error
    except azure.HttpResponseError as error:
        status, odata = error.status_code or 0, error.error
        message = odata.message if odata is not None else error.message
        text = f"Azure ML reports: {without_secrets(str(message), _MAX)}"
        # Nor does a successful response that was cut off.
        may_pass = 0 < status < 400 or status in (408, 429) or status >= 500
        if may_pass or (error.response is None and _NO_LOGIN_NOW.search(str(message))):
            wait = "" if error.response is None else error.response.headers.get("Retry-After", "")
            seconds = float(wait) if wait.replace(".", "", 1).isdecimal() else None
            raise TransientError(text, seconds) from error
        if status == 404 and (odata is None or _ABOVE.match(f"{odata.code} {message}")):
            status = 0
        raise RefusedError(text, status) from error
    except (azure.AzureError, KeyError, ValueError, OSError) as error:
        # The SDK does not know a part of the job, or a token file cannot be read.
        raise RefusedError(f"the Azure SDK reports: {without_secrets(str(error), _MAX)}") from error


def _transport(check: Check) -> Any:
    from azure.core.pipeline.transport import RequestsTransport

    class Checked(RequestsTransport):  # type: ignore[misc]  # mypy does not read the SDK
        def send(self, request: Any, **kwargs: Any) -> Any:
            check(request.method != "GET")
            return super().send(request, **kwargs)

    return Checked(connection_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS)
