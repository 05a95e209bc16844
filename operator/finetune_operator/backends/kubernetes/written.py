"""The storage behind the folders that a job of the kubernetes backend writes. Pure.

Two URIs may name one folder: a profile may mount a claim under another name, and a hostPath, an NFS
share or a Blob container is the same for every namespace and every profile.
"""

import json
import posixpath
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec, ProfileVolume
from finetune_operator.backends.base import Written
from finetune_operator.backends.kubernetes import volumes
from finetune_operator.planner.uris import outputs_of

Place = tuple[str, ...]

# Attributes that identify an inline volume; all others are mount options. Azure ignores case.
_CONTAINERS = ("containername", "sharename", "share", "foldername", "subdir", "volumeid")
_ACCOUNTS = ("storageaccount", "server", "source")
_SECRETS = ("secretname", "secretnamespace")


def written(job: FineTuneJob, profile: FineTuneProfileSpec | None) -> list[Written]:
    """Return the folders that the job writes and that outlive its pods.

    Args:
        job: The job.
        profile: Its profile; without one, every name is treated as a claim.
    """
    found = []
    for field, uri in outputs_of(job).items():
        try:
            path = volumes.claim_path(uri)
        except volumes.BadUriError:
            continue  # the job is refused for it
        volume = volumes.volume_of(path.claim, profile) if profile else None
        namespace = job.metadata.namespace
        root = _claim(namespace, path.claim) if volume is None else _root(volume, namespace)
        if root is not None:
            found.append(Written(field, uri, (*root, *PurePosixPath(path.path).parts)))
    return found


def _claim(namespace: str, name: str) -> Place:
    return ("persistentVolumeClaim", namespace, name)


def _root(volume: ProfileVolume, namespace: str) -> Place | None:
    """Return the identity of the folder that pods mount, or None if each pod has its own."""
    if volumes.is_lost_with_its_pod(volume):
        return None
    folder = PurePosixPath(volumes.sub_path_of(volume, namespace))
    return (*_source(volume, namespace), *folder.parts)


def _source(volume: ProfileVolume, namespace: str) -> Place:
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
    is_secret = any("secret" in key.lower() for key in rest)  # a Secret of the job's namespace
    return (kind, namespace if is_secret else "", json.dumps(rest, sort_keys=True))


def _inline(source: Mapping[str, Any], namespace: str) -> Place:
    """Return account and share of an inline volume."""
    given = source.get("volumeAttributes")
    pairs = given.items() if isinstance(given, Mapping) else ()
    attributes = {str(key).lower(): str(value) for key, value in pairs}
    container = [f"{key}={attributes[key]}" for key in _CONTAINERS if key in attributes]
    if not container:
        return (json.dumps(attributes, sort_keys=True),)
    account = [f"{key}={attributes[key]}" for key in _ACCOUNTS if key in attributes]
    if not account:  # a Secret names it
        account = [
            *(f"{key}={attributes[key]}" for key in _SECRETS if key in attributes),
            namespace,
        ]
    return (",".join(account), ",".join(container))
