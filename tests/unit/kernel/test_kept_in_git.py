"""A job that deletes itself while a GitOps tool keeps it: its author is warned, once."""

from typing import Any

import pytest

from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.kept_in_git import tool_of
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS
from support.api.builders import manifest
from support.kernel.kernel_world import World
from support.kernel.virtual_time import run

FLUX = {"labels": {"kustomize.toolkit.fluxcd.io/name": "jobs"}}
ARGO = {"annotations": {"argocd.argoproj.io/tracking-id": "jobs:finetune.dev/FineTuneJob:ns/tiny"}}


async def warnings(metadata: dict[str, dict[str, str]], ttl_seconds: int | None) -> list[str]:
    """Return the messages of Events that warn, once the job's attempt was there for a while."""
    world = World()
    fields: dict[str, Any] = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
    if ttl_seconds is not None:
        fields["ttlSecondsAfterFinished"] = ttl_seconds
    made = defaulted(manifest(backend={"type": "configmap"}, **fields))
    made["metadata"].update(metadata)
    await world.api.create(FINE_TUNE_JOBS, made, "ns")
    for _ in range(3):
        await world.settle()
        world.start_process()
    posted = world.api.objects(EVENTS)
    return [one["message"] for one in posted if one["reason"] == "WillBeRecreated"]


@pytest.mark.parametrize(("metadata", "tool"), [(FLUX, "Flux"), (ARGO, "Argo CD")])
def test_a_job_that_deletes_itself_and_comes_back_from_git_is_warned_about_once(
    metadata: dict[str, dict[str, str]], tool: str
) -> None:
    (said,) = run(warnings(metadata, 600))

    assert said.startswith(
        f"spec.ttlSecondsAfterFinished 600 deletes the job that long after its end, and {tool} then"
    )


def test_nobody_is_warned_about_a_job_that_stays_or_that_no_tool_keeps() -> None:
    assert run(warnings(ARGO, None)) == []
    assert run(warnings({"labels": {"app.kubernetes.io/managed-by": "Helm"}}, 600)) == []


def test_metadata_without_labels_names_no_tool() -> None:
    assert tool_of({"name": "tiny", "labels": None}) is None
