"""URIs of a job by field. Pure."""

import re

from finetune_operator.api.v1alpha1.job import FineTuneJob

HUB = "hf://"

# Names that the hub allows; the libraries would interpret any other name as a local folder.
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


def is_on_hub(uri: str) -> bool:
    """Whether the URI is on the hub."""
    return uri.startswith(HUB)


def is_hub_name(uri: str) -> bool:
    """Whether an `hf://` URI is a valid name of a repository on the hub."""
    return _HUB_NAME.fullmatch(uri.removeprefix(HUB)) is not None


def inputs_of(job: FineTuneJob) -> dict[str, str]:
    """Return the inputs of a job that may be on the hub: base model and data sets."""
    model, dataset = job.spec.model, job.spec.dataset
    inputs = {"spec.model.source": model.source, "spec.dataset.source": dataset.source}
    inputs |= {f"spec.dataset.also[{i}].source": one.source for i, one in enumerate(dataset.also)}
    if dataset.eval_source is not None:
        inputs["spec.dataset.evalSource"] = dataset.eval_source
    return inputs


def starts_of(job: FineTuneJob) -> dict[str, str]:
    """Return the adapter and the checkpoint from which training starts."""
    lora, resume = job.spec.method.lora, job.spec.checkpoint.resume_from
    starts = {}
    if lora is not None and lora.start_from is not None:
        starts["spec.method.lora.startFrom"] = lora.start_from
    if resume not in ("auto", "none"):
        starts["spec.checkpoint.resumeFrom"] = resume
    return starts


def outputs_of(job: FineTuneJob) -> dict[str, str]:
    """Return the outputs of a job."""
    named = {"spec.checkpoint.uri": job.spec.checkpoint.uri, "spec.output.uri": job.spec.output.uri}
    return {field: uri for field, uri in named.items() if uri is not None}
