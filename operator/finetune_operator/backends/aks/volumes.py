"""Where a pod finds what a job names by URI: claims are mounted below /mnt. Pure.

Also says which URIs the backend can use; `render` and `checks` ask the same functions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.planner.train_config import Locations
from finetune_trainer.config import DatasetSource

HUB = "hf://"
CLAIM = "pvc://"
MOUNT_ROOT = PurePosixPath("/mnt")
SCRATCH = PurePosixPath("/scratch")
TERMINATION_PATH = "/dev/termination-log"
CONFIG_FOLDER = "/etc/finetune"
SCHEDULED_EVENTS = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"

# Anything else the libraries would take for a folder of the pod.
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class BadUriError(ValueError):
    """A URI that no pod can use; the message says what to write instead."""


@dataclass(frozen=True)
class ClaimPath:
    """A path on a claim.

    Attributes:
        path: Below the claim's root; empty for the root itself.
    """

    claim: str
    path: str

    @property
    def in_pod(self) -> str:
        """The absolute path in every pod."""
        return str(MOUNT_ROOT / self.claim / self.path)


def claim_path(uri: str) -> ClaimPath:
    """Read `pvc://CLAIM/PATH`.

    Raises:
        BadUriError: it is another kind of URI, or leads out of the claim.
    """
    if not uri.startswith(CLAIM):
        raise BadUriError(f"{uri} cannot be used by the aks backend; use pvc://CLAIM/PATH")
    claim, _, path = uri.removeprefix(CLAIM).partition("/")
    if not _CLAIM_NAME.fullmatch(claim):
        raise BadUriError(f"{uri} names no claim; write pvc://CLAIM/PATH")
    if ".." in path.split("/"):
        raise BadUriError(f"{uri} leads out of the claim {claim}; write it without ..")
    return ClaimPath(claim, path.strip("/"))


def claim_uri(path: str) -> str:
    """Return the `pvc://` URI of a path in a pod; the path itself where it is on no claim."""
    path = path.removeprefix("file://")
    below = path.removeprefix(f"{MOUNT_ROOT}/")
    return f"{CLAIM}{below}" if below != path else path


def inputs_of(job: FineTuneJob) -> dict[str, str]:
    """Return every URI that is only read, by field."""
    spec = job.spec
    named = {"spec.model.source": spec.model.source, "spec.dataset.source": spec.dataset.source}
    named |= {
        f"spec.dataset.also[{i}].source": one.source for i, one in enumerate(spec.dataset.also)
    }
    if spec.dataset.eval_source is not None:
        named["spec.dataset.evalSource"] = spec.dataset.eval_source
    if spec.method.lora is not None and spec.method.lora.start_from is not None:
        named["spec.method.lora.startFrom"] = spec.method.lora.start_from
    if spec.checkpoint.resume_from not in ("auto", "none"):
        named["spec.checkpoint.resumeFrom"] = spec.checkpoint.resume_from
    return named


def outputs_of(job: FineTuneJob) -> dict[str, str]:
    """Return every URI that is written, by field."""
    named = {"spec.checkpoint.uri": job.spec.checkpoint.uri, "spec.output.uri": job.spec.output.uri}
    return {path: uri for path, uri in named.items() if uri is not None}


def may_be_on_hub(path: str) -> bool:
    """Say whether the input of that field may be on the hub."""
    return path not in ("spec.method.lora.startFrom", "spec.checkpoint.resumeFrom")


def is_hub_name(uri: str) -> bool:
    """Say whether an `hf://` URI names a repository of the hub."""
    return _HUB_NAME.fullmatch(uri.removeprefix(HUB)) is not None


def claims_of(job: FineTuneJob) -> Mapping[str, bool]:
    """Return the claims that the job names by URI, and whether each is only read."""
    claims: dict[str, bool] = {}
    for named, is_read_only in ((inputs_of(job), True), (outputs_of(job), False)):
        for uri in named.values():
            if uri.startswith(CLAIM):
                claim = claim_path(uri).claim
                claims[claim] = claims.get(claim, True) and is_read_only
    return claims


def locations(job: FineTuneJob, profile: FineTuneProfileSpec, threads: int) -> Locations:
    """Return every place as a rank sees it.

    Raises:
        BadUriError: a URI that `checks` would have refused.
    """
    spec = job.spec
    dataset, lora = spec.dataset, spec.method.lora
    held_out = None
    if dataset.eval_source or dataset.eval_split:
        source = dataset.eval_source or dataset.source
        split = dataset.eval_split or ("train" if dataset.eval_source else dataset.split)
        held_out = _rows(source, split)
    checkpoints = PurePosixPath(_folder(spec.checkpoint.uri, "checkpoints"))
    resume = spec.checkpoint.resume_from
    return Locations(
        model=_path(spec.model.source),
        train=_rows(dataset.source, dataset.split, dataset.weight),
        also=tuple(_rows(one.source, one.split, one.weight) for one in dataset.also),
        eval=held_out,
        adapter=_path(lora.start_from) if lora and lora.start_from else None,
        # Beside what it belongs to, so that curves and logs outlive the pods too.
        run_dir=str(checkpoints / "run"),
        checkpoint_dir=str(checkpoints),
        output_dir=_folder(spec.output.uri, "output"),
        cache_dir=str(PurePosixPath(profile.cache_directory) / "tokens"),
        termination_path=TERMINATION_PATH,
        resume_from=resume if resume in ("auto", "none") else _path(resume),
        threads_per_process=threads,
        metrics_host="0.0.0.0",
        scheduled_events_url=None if spec.capacity == "onDemand" else SCHEDULED_EVENTS,
    )


def _path(uri: str) -> str:
    return uri.removeprefix(HUB) if uri.startswith(HUB) else claim_path(uri).in_pod


def _rows(uri: str, split: str, weight: float = 1.0) -> DatasetSource:
    return DatasetSource(path=_path(uri), split=split, is_hub=uri.startswith(HUB), weight=weight)


def _folder(uri: str | None, name: str) -> str:
    return str(SCRATCH / name) if uri is None else claim_path(uri).in_pod
