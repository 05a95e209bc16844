"""Rules of a profile's `allow` that hold for every backend. Pure.

`fits` defines the meaning of a pattern.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1.allowances import Allowances
from finetune_operator.api.v1alpha1.job import FineTuneJob


def fits(name: str, patterns: Collection[str]) -> bool:
    """Return whether the name matches any pattern."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refused(path: str, what: str, name: str, allowed: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if no pattern of `allowed` fits `name`."""
    if not fits(name, allowed):
        listed = f" (allowed: {', '.join(allowed)})" if allowed else ""
        text = f"{name} is {what} that the profile does not allow{listed}; name another"
        yield Problem(path, text)


def unless_resumed(job: FineTuneJob, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems of rules that are newer than some jobs.

    They are warnings for a job that has a checkpoint: its training would otherwise end unfinished.
    """
    has_checkpoint = job.status.checkpoint.last is not None
    for one in problems:
        yield replace(one, severity=Severity.WARNING) if has_checkpoint else one


def foreign(job: FineTuneJob, field: str, profile: str, allow: Allowances) -> list[Problem]:
    """Return the problem of a namespace that may not use the profile.

    No other problem of its job is reported, because the messages contain values of the profile.

    Args:
        job: The job.
        field: Field of the job that names the profile.
        profile: Name of the profile.
        allow: Permissions of the profile.
    """
    namespace = job.metadata.namespace
    if fits(namespace, allow.namespaces):
        return []
    text = (
        f"{profile} may not be used in namespace {namespace}; name another profile, or "
        "have the namespace added to its allow.namespaces"
    )
    return [Problem(field, text)]


def forbidden(job: FineTuneJob, profile: str, allow: Allowances) -> Iterator[Problem]:
    """Yield a problem if `allow` forbids the job's size or initial checkpoint."""
    yield from _sizes(job, profile, allow)
    # Only the trainer can read which job wrote a checkpoint.
    if job.spec.checkpoint.allow_foreign and not allow.foreign_checkpoints:
        text = (
            f"true is not allowed by profile {profile}; remove it, or have the profile's "
            "allow.foreignCheckpoints set"
        )
        yield Problem("spec.checkpoint.allowForeign", text)


def _sizes(job: FineTuneJob, profile: str, allow: Allowances) -> Iterator[Problem]:
    topology = job.spec.topology
    for field, value, most in (
        ("nodes", topology.nodes, allow.max_nodes),
        ("gpusPerNode", topology.gpus_per_node, allow.max_gpus_per_node),
    ):
        if value > most:
            text = f"{value} is more than the {most} that profile {profile} allows"
            yield Problem(f"spec.topology.{field}", f"{text}; use at most {most}")
