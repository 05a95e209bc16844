"""Find the profile of a job: the snapshot of its first attempt, or the current profile.

Later attempts use the snapshot, so that a changed image never reads an old checkpoint. `allow` is
read again each time, so that a permission can be revoked. The batch Job of each attempt stores the
snapshot. Users who may patch batch Jobs but not create pods could write another image there. The
job's status therefore holds a digest of the snapshot and of the other children (`kept`), and a
changed snapshot is refused.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import ValidationError

from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfile, FineTuneProfileSpec
from finetune_operator.api.v1alpha1.topology import KubernetesSpec
from finetune_operator.backends.kubernetes.child_names import (
    CHILDREN_ANNOTATION,
    PROFILE_ANNOTATION,
    owner_of,
)
from finetune_operator.backends.profiles import USED_BY_AZUREML, ProfileError, Profiles
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import JOBS, Object

if TYPE_CHECKING:
    from finetune_operator.kube.cluster import Cluster

FIELD = "spec.backend.kubernetes.profile"


class Snapshot(ApiModel):
    """A FineTuneProfile at one moment."""

    name: str
    spec: FineTuneProfileSpec

    def to_annotation(self) -> str:
        """Return the fields that later attempts use: all except `allow`, which is read again.

        Defaults are included, because they may differ in another version of the operator.
        """
        return self.model_dump_json(by_alias=True, exclude_none=True, exclude={"spec": {"allow"}})


def settings_of(job: FineTuneJob) -> KubernetesSpec:
    """Return the job's settings for this backend, or the defaults if the job has none."""
    return job.spec.backend.kubernetes or KubernetesSpec()


class AttemptProfiles:
    """Returns the profile that an attempt of a job uses.

    Args:
        cluster: The cluster, in the operator.
        given: Profiles by name, if there is no cluster.
    """

    def __init__(self, cluster: "Cluster | None", given: Mapping[str, FineTuneProfile]) -> None:
        self._cluster = cluster
        self._profiles = Profiles(cluster, given, USED_BY_AZUREML)

    def of(self, job: FineTuneJob) -> Snapshot:
        """Return the job's profile: the snapshot of an earlier attempt with the current `allow`.

        Raises:
            ProfileError: The profile does not exist, cannot be read, or its snapshot was changed.
        """
        name = settings_of(job).profile
        now = self._profiles.get(name)
        kept = self._kept(job, self._cluster) if self._cluster is not None else None
        if kept is not None and kept.name == name:
            return Snapshot(name=name, spec=kept.spec.model_copy(update={"allow": now.allow}))
        return Snapshot(name=name, spec=now)

    def _kept(self, job: FineTuneJob, cluster: "Cluster") -> Snapshot | None:
        """Return the snapshot of the newest existing attempt."""
        key = Key(job.metadata.namespace, job.metadata.name)
        mine = {
            number: one
            for one in cluster.cache(JOBS).of_job(key)
            if owner_of(one).get("uid") == job.metadata.uid
            and _snapshot_text(one)
            and (number := _number(job.metadata.name, one))
        }
        if not mine:
            return None
        number = max(mine)
        noted = {one.number: one.digest for one in job.status.attempts}.get(number)
        if noted and noted != digest_of(mine[number]):
            text = (
                f"{settings_of(job).profile} is stored for later attempts on Job "
                f"{job.metadata.name}-{number}, but its snapshot was changed; delete that Job to "
                "continue without it"
            )
            raise ProfileError(text)
        try:
            return Snapshot.model_validate_json(_snapshot_text(mine[number]))
        except ValidationError:
            return None  # written by an operator with other profile fields; use the current profile


def digest_of(batch_job: Object) -> str:
    """Return the digest of the texts that a batch Job stores; empty without a snapshot."""
    texts = kept_texts(batch_job)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest() if texts else ""


def kept_texts(batch_job: Object) -> tuple[str, ...]:
    """Return the texts that the digest covers; none without a snapshot."""
    text = _snapshot_text(batch_job)
    if not text:
        return ()
    # A batch Job of an earlier version stores only the snapshot.
    children = batch_job["metadata"]["annotations"].get(CHILDREN_ANNOTATION)
    return (text,) if children is None else (text, children)


def _snapshot_text(batch_job: Object) -> str:
    annotations = batch_job["metadata"].get("annotations") or {}
    return str(annotations.get(PROFILE_ANNOTATION, ""))


def _number(job: str, batch_job: Object) -> int:
    """Return the attempt's number from its name, which is immutable; 0 for None."""
    number = str(batch_job["metadata"]["name"]).removeprefix(f"{job}-")
    return int(number) if number.isdecimal() else 0
