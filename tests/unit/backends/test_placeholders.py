"""`{namespace}` and `{name}` in the URIs of a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validation import check_object, defaulted
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.backends.local.backend import LocalBackend
from support.api.builders import job, manifest, planned
from support.kubernetes.kubernetes_cases import JOB, backend

PLACE = "pvc://c/{namespace}/{name}/x"
FIELDS = (
    "model.source",
    "dataset.source",
    "dataset.evalSource",
    "method.lora.startFrom",
    "checkpoint.uri",
    "checkpoint.resumeFrom",
    "output.uri",
    "backend.local.runDirectory",
)


def at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("field", FIELDS)
def test_a_job_has_its_names_in_every_uri_and_nothing_else_is_taken(field: str) -> None:
    made = job(name="copy", **{"metadata.namespace": "team", field: PLACE})
    assert at(made.to_object()["spec"], field) == "pvc://c/team/copy/x"
    for wrong in ("{uid}", "{Name}", "{", "a}", "{{name}}", "{}"):
        refused = check_object(defaulted(manifest(**{field: f"file://./{wrong}"})))
        (message,) = [one.message for one in refused if "brace" in one.message]
        assert "use {namespace} or {name}" in message


def test_further_rows_have_them_too_and_the_object_is_left_as_it_is() -> None:
    value = manifest(dataset__also=[{"source": PLACE}], output__uri=PLACE)
    made = FineTuneJob.model_validate(value)
    assert made.spec.dataset.also[0].source == "pvc://c/default/tiny/x"
    assert value["spec"]["output"]["uri"] == PLACE
    assert FineTuneJob.model_validate_json(json.dumps(value)) == made


def test_a_renamed_copy_writes_folders_of_its_own_on_a_cluster() -> None:
    uris = {"output__uri": "pvc://models/{name}", "checkpoint__uri": "pvc://checkpoints/{name}"}
    for name in ("first", "second"):
        request = backend().render(planned(name=name, **{**JOB, **uris}), Attempt(1))
        text = json.dumps(request.objects)
        assert f"/mnt/models/{name}" in text
        assert f"/mnt/checkpoints/{name}" in text
        assert "{name}" not in text


def test_a_renamed_copy_writes_folders_of_its_own_on_this_machine(tmp_path: Path) -> None:
    local = LocalBackend(BackendContext(tmp_path))
    fields = {
        "checkpoint__uri": "file:///data/{namespace}/{name}",
        "backend.local.runDirectory": "mine/{name}",
    }
    made = local.folders(job(name="copy", **fields))
    assert made.run == tmp_path / "mine" / "copy"
    assert made.checkpoint == Path("/data/default/copy")


def test_malformed_objects_are_left_to_those_who_tell_what_is_wrong() -> None:
    malformed: list[dict[str, Any]] = [
        {"spec": []},
        {"metadata": {}, "spec": {"dataset": {"also": {}}}},
        {},
    ]
    for broken in malformed:
        with pytest.raises(ValueError, match="validation error"):
            FineTuneJob.model_validate(broken)
