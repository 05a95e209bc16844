"""`ftctl doctor --azureml`: check that Azure has the resources named by the profiles of a file.

The command only reads, with the identity of its caller. Run it in the operator's pod to check the
operator's own identity.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from finetune_operator.api.v1alpha1.profile import FineTuneProfile
from finetune_operator.backends.azureml.names import workspace_id
from finetune_operator.backends.azureml.sdk import (
    RefusedError,
    Sdk,
    credential,
    load,
    log_in,
    translated_errors,
)
from finetune_operator.cli.findings import Finding, State
from finetune_operator.cli.target import profiles_of
from finetune_operator.errors import BackendError, FineTuneError

_IN_WORKSPACE = re.compile(r"azureml:([^/:]+):([^/:]+)")
_ADVICE = " Correct the profile, or grant this identity read access"
_IS_PATTERN = re.compile(r"[*?]")


def examine_azureml(file: Path | None, environ: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each Azure resource that the profiles of a file name.

    Raises:
        FineTuneError: the file has no profile with a workspace, or the Azure SDK is missing.
        InvalidJobError: a profile cannot be used.
    """
    if file is None:
        raise FineTuneError("--azureml checks the resources in a profile; add --profile FILE")
    profiles = [one for one in profiles_of(None, file).values() if one.spec.azureml is not None]
    if not profiles:
        raise FineTuneError(f"{file} has no FineTuneProfile with azureml; name another file")
    load()
    logging.getLogger("azure").setLevel(logging.CRITICAL)  # the findings report its errors
    return [found for one in profiles for found in _of_profile(one, environ)]


def _of_profile(profile: FineTuneProfile, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of a profile; checks that depend on a failed check are left out."""
    topic = f"azureml, profile {profile.metadata.name}"
    settings, allow = profile.spec.azureml, profile.spec.allow
    assert settings is not None
    logged_in: list[Sdk] = []

    def identity() -> str:
        account = credential(environ, settings.client_id, _refuse_writes)
        log_in(account)
        logged_in.append(Sdk(workspace_id(settings), account, _refuse_writes))
        return settings.client_id or environ.get("AZURE_CLIENT_ID", "the identity logged in here")

    yield _checked(topic, "identity", identity)
    if not logged_in:
        return
    (sdk,) = logged_in
    name = settings.workspace
    workspace = _checked(topic, f"workspace {name}", lambda: sdk.ml.workspaces.get(name).location)
    yield workspace
    if workspace.state is not State.OK:
        return
    for name in _named(settings.compute, allow.computes):
        yield _checked(topic, f"compute {name}", partial(_compute, sdk, name))
    for name in _named(settings.environment, allow.environments):
        yield _environment(topic, sdk, name)
    for name in _named(settings.datastore, allow.datastores):
        yield _checked(topic, f"datastore {name}", partial(_datastore, sdk, name))


def _checked(topic: str, name: str, ask: Callable[[], Any]) -> Finding:
    try:
        with translated_errors():
            return Finding(topic, name, State.OK, str(ask()))
    except RefusedError as error:
        advice = _ADVICE if error.status in (403, 404) else ""
        return Finding(topic, name, State.MISSING, f"{error}{advice}")
    except BackendError as error:
        return Finding(topic, name, State.MISSING, str(error))


def _compute(sdk: Sdk, name: str) -> str:
    found = sdk.ml.compute.get(name)
    if (sizes := (found.properties or {}).get("instanceTypes")) is not None:
        return f"{found.type}, instance types {', '.join(sorted(sizes))}"
    words = (found.type, getattr(found, "size", None), getattr(found, "tier", None))
    return ", ".join(str(word) for word in words if word)


def _datastore(sdk: Sdk, name: str) -> str:
    return str(sdk.ml.datastores.get(name).type.value)


def _environment(topic: str, sdk: Sdk, name: str) -> Finding:
    title = f"environment {name}"
    match = _IN_WORKSPACE.fullmatch(name)
    if match is None:
        return Finding(topic, title, State.ABSENT, "is in a registry, which is not checked")
    return _checked(topic, title, lambda: sdk.ml.environments.get(*match.groups()).image or "found")


def _named(own: str | None, allowed: list[str]) -> list[str]:
    """Return the profile's own name and the names that jobs may choose, without patterns."""
    names = dict.fromkeys([*([own] if own else []), *allowed])
    return [name for name in names if not _IS_PATTERN.search(name)]


def _refuse_writes(is_write: bool) -> None:
    assert not is_write, "doctor only reads"
