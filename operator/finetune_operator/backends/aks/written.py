"""Which folders a job of the aks backend writes, and where they really are. Pure.

Two URIs may lead to one folder: a profile may mount a claim under a name of its own, and a
hostPath, an NFS share or a Blob container is the same for every namespace and every profile.
"""

import json
import posixpath
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec, ProfileVolume
from finetune_operator.backends.aks import volumes
from finetune_operator.backends.base import Written
from finetune_operator.planner.uris import outputs_of

Place = tuple[str, ...]

# Of an inline volume of a storage driver; all else is how it is mounted. Azure ignores their case.
_CONTAINERS = ("containername", "sharename", "share", "foldername", "subdir", "volumeid")
_ACCOUNTS = ("storageaccount", "server", "source")
_SECRETS = ("secretname", "secretnamespace")


def written(job: FineTuneJob, profile: FineTuneProfileSpec | None) -> list[Written]:
    """Return the folders that the job writes and that outlive its pods.

    Args:
        job: The job.
        profile: Its profile; without one, every name is taken for a claim's.
    """
    found = []
    for field, uri in outputs_of(job).items():
        try:
            path = volumes.claim_path(uri)
        except volumes.BadUriError:
            continue  # of a job that is refused for it
        volume = volumes.volume_of(path.claim, profile) if profile else None
        namespace = job.metadata.namespace
        root = _claim(namespace, path.claim) if volume is None else _root(volume, namespace)
        if root is not None:
            found.append(Written(field, uri, (*root, *PurePosixPath(path.path).parts)))
    return found


def _claim(namespace: str, name: str) -> Place:
    return ("persistentVolumeClaim", namespace, name)


def _root(volume: ProfileVolume, namespace: str) -> Place | None:
    """Return what the volume is; None for one that each pod has for itself."""
    if volumes.is_lost_with_its_pod(volume):
        return None
    ((kind, source),) = volume.source.items()
    if not isinstance(source, Mapping):
        return (kind, str(source))
    if kind == "persistentVolumeClaim":
        return _claim(namespace, str(source.get("claimName")))
    if kind in ("hostPath", "nfs"):
        path = posixpath.normpath(f"/{source.get('path', '')}")
        return (kind, str(source.get("server", "")), *PurePosixPath(path.lstrip("/")).parts)
    if kind == "csi":
        return (kind, str(source.get("driver")), *_inline(source, namespace))
    rest = {key: value for key, value in source.items() if key not in ("readOnly", "fsType")}
    is_secret = any("secret" in key.lower() for key in rest)  # the namespace's own
    return (kind, namespace if is_secret else "", json.dumps(rest, sort_keys=True))


def _inline(source: Mapping[str, Any], namespace: str) -> Place:
    """Return which share of which account an inline volume is."""
    told = {str(key).lower(): str(value) for key, value in _attributes(source).items()}
    container = [f"{key}={told[key]}" for key in _CONTAINERS if key in told]
    if not container:
        return (json.dumps(told, sort_keys=True),)
    account = [f"{key}={told[key]}" for key in _ACCOUNTS if key in told]
    if not account:  # a Secret says which
        account = [*(f"{key}={told[key]}" for key in _SECRETS if key in told), namespace]
    return (",".join(account), ",".join(container))


def _attributes(source: Mapping[str, Any]) -> Mapping[str, Any]:
    told = source.get("volumeAttributes")
    return told if isinstance(told, Mapping) else {}
