"""Map the URIs of a job to inputs, outputs and mount points on the compute. Pure.

Inputs are mounted, because Kubernetes compute cannot download them. A mount point is known only on
the compute. The command therefore passes each mount point to the trainer, whose configuration names
it as `mount://NAME/REST`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from finetune_operator.api.v1alpha1.azureml_profile import AzureMLSettings
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import GpuMetrics
from finetune_operator.backends.azureml.names import azureml_of
from finetune_operator.backends.base import Written
from finetune_operator.planner import uris
from finetune_operator.planner.train_config import SCHEDULED_EVENTS, Locations
from finetune_trainer.config import is_data_file

AZUREML = "azureml://"
DATASTORE_FORM = "azureml://datastores/DATASTORE/paths/PATH"
MODEL_FORM = "azureml://models/NAME/versions/VERSION"
REGISTRY_FORM = "azureml://registries/REGISTRY/models/NAME/versions/VERSION"
CHECKPOINTS, OUTPUT = "checkpoints", "output"
SCRATCH = "mount://scratch"
"""A folder on the node's own disk, new for each start, because each write to a mount copies the
file.
"""

_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_DATASTORE = re.compile(r"azureml://datastores/([A-Za-z0-9_]+)/paths(?:/(.*))?")
_REGISTRY_MODEL = re.compile(
    rf"(azureml://registries/({_NAME})/models/{_NAME}/versions/{_NAME})(?:/(.*))?"
)
_WORKSPACE_MODEL = re.compile(rf"azureml://models/({_NAME})/versions/({_NAME})(?:/(.*))?")
# Characters refused in paths: escapes, separators of URLs, patterns, the backslash, and invisible
# characters.
_NOT_ITSELF = re.compile(r"[%?#*\\\x00-\x1f\x7f]")
_MODELS = ("spec.model.source", "spec.method.lora.startFrom")
_INPUT_NAMES = {
    "spec.model.source": "model",
    "spec.dataset.source": "data",
    "spec.dataset.evalSource": "eval",
    "spec.method.lora.startFrom": "adapter",
    "spec.checkpoint.resumeFrom": "resume",
}


class BadUriError(ValueError):
    """A URI that no job of Azure ML can use; the message names the alternative."""


class InputType(StrEnum):
    """Azure ML's names for types of inputs."""

    FOLDER = "uri_folder"
    MODEL = "custom_model"


@dataclass(frozen=True)
class Place:
    """The target of a URI.

    Attributes:
        root: The mounted folder, as Azure ML names it.
        rest: Path below the root; empty for the root itself.
        datastore: Datastore of the URI; None for a registered model.
        path: Path in the datastore; empty for a registered model.
        model: Name of a model of the workspace; None for other places.
        registry: Registry of a model; None for other places.
    """

    root: str
    rest: str
    type: InputType
    datastore: str | None = None
    path: str = ""
    model: str | None = None
    registry: str | None = None


@dataclass(frozen=True)
class Input:
    """An input of the job.

    Attributes:
        path: The mounted folder, as Azure ML names it.
    """

    type: InputType
    path: str


@dataclass(frozen=True)
class Places:
    """The mounts of a job.

    Attributes:
        inputs: By name; read only.
        outputs: URI of the folder, by name.
        mounted: The `mount://` form of each URI that the job reads.
    """

    inputs: Mapping[str, Input]
    outputs: Mapping[str, str]
    mounted: Mapping[str, str]

    @property
    def arguments(self) -> str:
        """Arguments that pass each mount point to the trainer."""
        given = [f"{name}=${{{{inputs.{name}}}}}" for name in self.inputs]
        given += [f"{name}=${{{{outputs.{name}}}}}" for name in self.outputs]
        return " ".join(given)


def place_of(field: str, uri: str) -> Place:
    """Return the target of the URI in a field of the job.

    Raises:
        BadUriError: The field does not accept such a URI.
    """
    if match := _DATASTORE.fullmatch(uri):
        datastore, path = match[1], _clean(uri, match[2])
        folder = f"{AZUREML}datastores/{datastore}/paths/"
        mounted, rest = path, ""
        if field.startswith("spec.dataset.") and is_data_file(PurePosixPath(path).name):
            mounted, _, rest = path.rpartition(
                "/"
            )  # mount the folder of a file, so that the file retains its name
        return Place(folder + mounted, rest, InputType.FOLDER, datastore, path)
    if field in _MODELS and (match := _REGISTRY_MODEL.fullmatch(uri)):
        root, registry, rest = match.groups()
        return Place(root, _clean(uri, rest), InputType.MODEL, registry=registry)
    if field in _MODELS and (match := _WORKSPACE_MODEL.fullmatch(uri)):
        name, version, rest = match.groups()
        root = f"azureml:{name}:{version}"
        return Place(root, _clean(uri, rest), InputType.MODEL, model=name)
    raise BadUriError(f"{uri} cannot be used by the azureml backend; use {_forms(field)}")


def outputs_of(job: FineTuneJob, datastore: str) -> dict[str, str]:
    """Return the URI of each folder that the job writes, by its field.

    A folder without a URI is in `datastore`, with the job's uid in its path, so that no other job
    has it, not even a later one with the same name.
    """
    metadata = job.metadata
    parts = ("finetune", metadata.namespace, metadata.name, metadata.uid)
    own = "/".join(part for part in parts if part)
    default = f"{AZUREML}datastores/{datastore}/paths/{own}"
    return {
        "spec.checkpoint.uri": job.spec.checkpoint.uri or f"{default}/{CHECKPOINTS}",
        "spec.output.uri": job.spec.output.uri or f"{default}/{OUTPUT}",
    }


def places_of(job: FineTuneJob, datastore: str) -> Places:
    """Return the mounts of a job whose URIs `compute_checks` has accepted."""
    inputs: dict[str, Input] = {}
    mounted: dict[str, str] = {}
    names: dict[str, str] = {}
    for field, uri in (uris.inputs_of(job) | uris.starts_of(job)).items():
        if uris.is_on_hub(uri):
            continue
        place = place_of(field, uri)
        name = names.setdefault(place.root, _input_name(field))
        inputs[name] = Input(place.type, place.root)
        mounted[uri] = f"mount://{name}/{place.rest}".rstrip("/")
    checkpoints, output = (
        place_of(field, uri).root for field, uri in outputs_of(job, datastore).items()
    )
    return Places(inputs, {CHECKPOINTS: checkpoints, OUTPUT: output}, mounted)


def written(job: FineTuneJob, settings: AzureMLSettings | None) -> list[Written]:
    """Return the folders that the job writes.

    Args:
        job: The job.
        settings: Settings of its profile. Without them, the profile's name replaces the workspace,
            and the datastore of folders that the job does not name is unknown.
    """
    if settings is None:
        holder: tuple[str, ...] = ("azureml profile", azureml_of(job.spec).profile)
        outputs = uris.outputs_of(job)
    else:  # Azure ignores case
        group, workspace = settings.resource_group.lower(), settings.workspace.lower()
        holder = ("azureml", settings.subscription_id.lower(), group, workspace)
        outputs = outputs_of(job, settings.datastore)
    found = []
    for field, uri in outputs.items():
        try:
            place = place_of(field, uri)
        except BadUriError:
            continue  # the job is refused for it
        parts = [part for part in place.path.split("/") if part]
        found.append(Written(field, uri, (*holder, str(place.datastore).lower(), *parts)))
    return found


def locations(
    job: FineTuneJob, places: Places, *, allow_foreign: bool, listing_lag_seconds: float | None
) -> Locations:
    """Return all locations in the form of the trainer's configuration."""
    return Locations(
        path_of=places.mounted.__getitem__,
        run_dir=f"{SCRATCH}/run",
        checkpoint_dir=f"mount://{CHECKPOINTS}",
        output_dir=f"mount://{OUTPUT}",
        cache_dir=f"{SCRATCH}/tokens",
        termination_path=f"{SCRATCH}/termination.json",
        allow_foreign=allow_foreign,
        gpu_metrics=GpuMetrics.NONE,  # no Prometheus can scrape such a node
        scheduled_events_url=None if job.spec.capacity == "onDemand" else SCHEDULED_EVENTS,
        listing_lag_seconds=listing_lag_seconds,
    )


def _forms(field: str) -> str:
    """Return the accepted forms of a field's URI."""
    forms = [DATASTORE_FORM]
    if field in _MODELS:
        forms += [MODEL_FORM, REGISTRY_FORM]
    if field == "spec.model.source" or field.startswith("spec.dataset."):
        forms.append("hf://ORG/NAME")
    return " or ".join(forms)


def _input_name(field: str) -> str:
    if field in _INPUT_NAMES:
        return _INPUT_NAMES[field]
    number = re.search(r"\d+", field)
    assert number is not None, f"{field} is not an input"
    return f"also_{number[0]}"


def _clean(uri: str, path: str | None) -> str:
    """Return a path below a root, without a slash at its end.

    Raises:
        BadUriError: The path leads out of the root, or is ambiguous.
    """
    cleaned = (path or "").removesuffix("/")
    if cleaned and not {"", ".", ".."}.isdisjoint(cleaned.split("/")):
        raise BadUriError(f"{uri} has an empty part, . or .. in its path; remove it")
    if odd := _NOT_ITSELF.search(cleaned):
        raise BadUriError(f"{uri} has {odd[0]!r}, which is not taken literally; rename the path")
    return cleaned
