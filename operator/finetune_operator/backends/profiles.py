"""FineTuneProfiles by name, as backends read them: from the cluster, or as given to `ftctl`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfile, FineTuneProfileSpec
from finetune_operator.backends.base import Backend
from finetune_operator.errors import BackendError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, Object
from finetune_operator.kube.watch import Watch

if TYPE_CHECKING:
    from finetune_operator.kube.cluster import Cluster

P = TypeVar("P")

PROFILES = Watch(FINE_TUNE_PROFILES, selector=None)
"""Kinds that a backend watches if its jobs name profiles."""

USED_BY_KUBERNETES = frozenset({
    "image", "command", "init", "env", "image_pull_secrets", "image_pull_policy",
    "service_account_name", "workload_identity", "priority_class_name", "runtime_class_name",
    "scheduler_name", "nodes", "resources", "volumes", "cache_directory", "security", "network",
    "rank_zero_name", "gpu_metrics",
    "allow.service_accounts", "allow.secrets", "allow.claims", "allow.volumes", "allow.images",
    "allow.priority_classes", "allow.env", "allow.metadata", "allow.max_resources",
    "allow.scheduling", "allow.trackers", "allow.max_empty_dir",
    "allow.max_termination_grace_seconds", "allow.require_queue",
})  # fmt: skip
"""Fields of a profile that no other backend uses."""

USED_BY_AZUREML = frozenset({
    "azureml", "allow.computes", "allow.serverless", "allow.sizes", "allow.environments",
    "allow.datastores", "allow.models", "allow.registries", "allow.experiments",
})  # fmt: skip
"""Fields of a profile that no other backend uses."""

_DEFAULTS = FineTuneProfileSpec()


class ProfileError(ValueError):
    """The profile is missing or unusable; the message is a sentence about the field that names it.

    Attributes:
        is_unknown: Whether the profile could only be in a cluster, which is not read here.
    """

    def __init__(self, message: str, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown

    def problem(self, field: str) -> Problem:
        """Return the problem that `validate` reports about the field that names the profile."""
        return Problem(field, str(self), Severity.WARNING if self.is_unknown else Severity.ERROR)


@dataclass(frozen=True)
class Profiles:
    """Source of the profiles of a backend's jobs.

    Attributes:
        cluster: The cluster, in the operator.
        given: Profiles by name, if there is no cluster.
        unused: Fields that the backend does not use. It refuses a profile that sets such a field,
            because the field would have no effect.
    """

    cluster: "Cluster | None"
    given: Mapping[str, FineTuneProfile]
    unused: Collection[str]
    _read: dict[str, tuple[Object, FineTuneProfileSpec]] = field(default_factory=dict, repr=False)

    def get(self, name: str) -> FineTuneProfileSpec:
        """Return the current profile.

        Raises:
            ProfileError: The profile does not exist, cannot be read, or is for another backend.
        """
        spec = self._found(name)
        if wrong := sorted(field for field in self.unused if _is_set(spec, field)):
            text = (
                f"{name} has {', '.join(map(_shown, wrong))}, without effect in this backend; "
                "name a profile for it"
            )
            raise ProfileError(text)
        return spec

    def names(self) -> list[str]:
        """Return the names of all profiles, including those for other backends."""
        if self.cluster is None:
            return sorted(self.given)
        return sorted(one["metadata"]["name"] for one in self.cluster.cache(FINE_TUNE_PROFILES))

    def _found(self, name: str) -> FineTuneProfileSpec:
        if self.cluster is None:
            if name not in self.given:
                text = f"{name} is looked up in the cluster; what it allows is not checked here"
                raise ProfileError(text, is_unknown=True)
            return self.given[name].spec
        obj = self.cluster.cache(FINE_TUNE_PROFILES).get(Key("", name))
        there = self._read.get(name)
        if obj is None or there is None or there[0] is not obj:
            self._read[name] = there = (obj or {}, _parsed(name, obj))
        return there[1]


def profile_to_render(
    backend: Backend, job: FineTuneJob, profile_of: Callable[[FineTuneJob], P], field: str
) -> P:
    """Return the profile of a job whose attempt is rendered now.

    Job and profile may have changed since the attempt was opened, if it could not be created then.

    Raises:
        BackendError: The profile is unknown or no longer allows the job.
    """
    wrong = [one for one in backend.validate(job) if one.severity is Severity.ERROR]
    if wrong:
        raise BackendError("; ".join(map(str, wrong)))
    try:
        return profile_of(job)
    except ProfileError as error:
        advice = "; give its manifest with --profile FILE" if error.is_unknown else ""
        raise BackendError(f"{field} {error}{advice}") from error


def _shown(field: str) -> str:
    return ".".join(map(to_camel, field.split(".")))


def _is_set(spec: FineTuneProfileSpec, field: str) -> bool:
    value = attrgetter(field)
    return bool(value(spec) != value(_DEFAULTS))


def _parsed(name: str, obj: Object | None) -> FineTuneProfileSpec:
    if obj is None:
        raise ProfileError(f"{name} does not exist; create that FineTuneProfile or name another")
    try:
        return FineTuneProfileSpec.model_validate(obj["spec"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"{name} cannot be used (spec.{where}: {first['msg']}); correct the profile"
        raise ProfileError(text) from error
