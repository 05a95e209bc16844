"""Map the URIs of a job to paths in its pods, and refuse unsupported URIs. Pure.

`pvc://NAME/PATH` is on the profile's volume NAME, if that is mounted, else on the claim NAME of the
job's namespace, below /mnt.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec, ProfileVolume
from finetune_operator.backends.allow_rules import fits
from finetune_operator.backends.kubernetes import trackers
from finetune_operator.planner.train_config import SCHEDULED_EVENTS, Locations
from finetune_operator.planner.uris import inputs_of, outputs_of, starts_of

CLAIM = "pvc://"
MOUNT_ROOT = PurePosixPath("/mnt")
SCRATCH = PurePosixPath("/scratch")
TERMINATION_PATH = "/dev/termination-log"
CONFIG_FOLDER = "/etc/finetune"

_LOST_WITH_ITS_POD = frozenset({"emptyDir", "ephemeral"})
_NEVER_WRITABLE = frozenset({"configMap", "downwardAPI", "image", "projected", "secret"})
_SHARED_SOURCES = frozenset({"persistentVolumeClaim", "nfs", "azureFile"})
_SHARED_DRIVERS = frozenset({"file.csi.azure.com", "blob.csi.azure.com", "nfs.csi.k8s.io"})
_CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class BadUriError(ValueError):
    """A URI that no pod can use; the message names the alternative."""


@dataclass(frozen=True)
class ClaimPath:
    """A path on a claim, or on a volume of the profile.

    Attributes:
        claim: Name of the claim, or of the volume.
        path: Path below its root; empty for the root itself.
    """

    claim: str
    path: str


def claim_path(uri: str) -> ClaimPath:
    """Read `pvc://CLAIM/PATH`.

    Raises:
        BadUriError: The URI is of another kind, or leads out of the claim.
    """
    if not uri.startswith(CLAIM):
        raise BadUriError(f"{uri} cannot be used by the kubernetes backend; use pvc://CLAIM/PATH")
    claim, _, path = uri.removeprefix(CLAIM).partition("/")
    if not _CLAIM_NAME.fullmatch(claim):
        raise BadUriError(f"{uri} names no claim; write pvc://CLAIM/PATH")
    if ".." in path.split("/"):
        raise BadUriError(f"{uri} leads out of the claim {claim}; write it without ..")
    return ClaimPath(claim, path.strip("/"))


def volume_of(name: str, profile: FineTuneProfileSpec) -> ProfileVolume | None:
    """Return the profile's volume that `pvc://NAME/PATH` is on, or None if NAME is a claim."""
    return next((one for one in profile.volumes if one.name == name), None)


def sub_path_of(volume: ProfileVolume, namespace: str) -> str:
    """Return the folder of the volume that pods of a namespace mount; empty for its root."""
    return (volume.sub_path or "").replace("{namespace}", namespace)


def is_writable(volume: ProfileVolume) -> bool:
    """Return whether pods can write to the volume."""
    if volume.read_only or not _NEVER_WRITABLE.isdisjoint(volume.source):
        return False
    return not any(isinstance(one, dict) and one.get("readOnly") for one in volume.source.values())


def is_mounted_read_only(volume: ProfileVolume, profile: FineTuneProfileSpec) -> bool:
    """Return whether pods mount the volume read-only.

    A volume that no job may name is writable only for caches: the profile's cache directory, or a
    folder that a variable of the profile names.
    """
    if volume.read_only or fits(volume.name, profile.allow.volumes):
        return volume.read_only
    caches = (profile.cache_directory, *profile.env.values())
    return not any(PurePosixPath(one).is_relative_to(volume.mount_path) for one in caches)


def is_lost_with_its_pod(volume: ProfileVolume) -> bool:
    """Return whether each pod has its own volume, which is deleted with the pod."""
    # Kubernetes treats a volume without a source as an emptyDir.
    return not volume.source or not _LOST_WITH_ITS_POD.isdisjoint(volume.source)


def is_fenced(job: FineTuneJob, profile: FineTuneProfileSpec) -> bool:
    """Return whether claims of the next attempt stop the writes of an attempt on a lost node.

    The processes of both attempts must see the same files. A claim on a disk of one node is safe:
    the scheduler places the next attempt on that node, or the disk is attached to one node only.
    """
    uris = [uri for uri in outputs_of(job).values() if uri.startswith(CLAIM)]
    written = [volume_of(claim_path(uri).claim, profile) for uri in uris]
    return all(one is None or _is_shared(one) for one in written)


def _is_shared(volume: ProfileVolume) -> bool:
    if volume.shared is not None or is_lost_with_its_pod(volume):
        return volume.shared is not False
    driver = volume.source.get("csi", {}).get("driver")
    return not _SHARED_SOURCES.isdisjoint(volume.source) or driver in _SHARED_DRIVERS


def path_in_pod(uri: str, profile: FineTuneProfileSpec) -> str:
    """Return the absolute path that `pvc://NAME/PATH` has in every pod.

    Raises:
        BadUriError: as `claim_path`.
    """
    place = claim_path(uri)
    volume = volume_of(place.claim, profile)
    root = PurePosixPath(volume.mount_path) if volume else MOUNT_ROOT / place.claim
    return str(root / place.path)


def output_uri(path: str, output: str, folder: str) -> str:
    """Return the URI of an artifact, or its path in the pod if it is outside the output folder.

    Args:
        path: Its path in a pod; may be a `file://` URI.
        output: URI of the output folder.
        folder: Path of the output folder in the pod.
    """
    exported = PurePosixPath(path.removeprefix("file://"))
    if not folder or not exported.is_relative_to(folder):
        return str(exported)
    below = exported.relative_to(folder)
    return "/".join((output.rstrip("/"), *below.parts))


def claims_of(job: FineTuneJob, profile: FineTuneProfileSpec) -> Mapping[str, bool]:
    """Return the claims that the job names by URI, and whether each is only read.

    Volumes of the profile, which every pod has, are excluded.
    """
    claims: dict[str, bool] = {}
    for named, is_read_only in ((inputs_of(job) | starts_of(job), True), (outputs_of(job), False)):
        for uri in named.values():
            if uri.startswith(CLAIM):
                claim = claim_path(uri).claim
                if volume_of(claim, profile) is not None:
                    continue
                claims[claim] = claims.get(claim, True) and is_read_only
    return claims


def locations(job: FineTuneJob, profile: FineTuneProfileSpec, threads: int) -> Locations:
    """Return all locations as paths in a pod.

    Raises:
        BadUriError: A URI that `pod_checks` would have refused.
    """
    spec = job.spec
    checkpoints = PurePosixPath(_folder(spec.checkpoint.uri, "checkpoints", profile))
    return Locations(
        path_of=partial(path_in_pod, profile=profile),
        # The run directory is beside the checkpoints, so that curves and logs also outlive the
        # pods.
        run_dir=str(checkpoints / "run"),
        checkpoint_dir=str(checkpoints),
        output_dir=_folder(spec.output.uri, "output", profile),
        cache_dir=str(PurePosixPath(profile.cache_directory) / "tokens"),
        termination_path=TERMINATION_PATH,
        allow_foreign=profile.allow.foreign_checkpoints,
        threads_per_process=threads,
        metrics_host="0.0.0.0",
        gpu_metrics=profile.gpu_metrics,
        scheduled_events_url=None if spec.capacity == "onDemand" else SCHEDULED_EVENTS,
        listing_lag_seconds=profile.listing_lag_seconds,
        trackers=trackers.configs(job),
    )


def _folder(uri: str | None, name: str, profile: FineTuneProfileSpec) -> str:
    return str(SCRATCH / name) if uri is None else path_in_pod(uri, profile)
