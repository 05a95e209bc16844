"""A pod is fenced if its job writes only to storage that all nodes share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.backends.base import Attempt
from finetune_operator.backends.kubernetes.child_names import facts_of
from finetune_operator.cli.app import app
from finetune_operator.kube.labels import FENCED_ANNOTATION
from finetune_operator.kube.resources import Object
from support.api.builders import manifest, planned
from support.kubernetes.kubernetes_cases import JOB, backend, profile

ON_VOLUME = {"checkpoint__uri": "pvc://v/{name}/c"}


def batch_job_on(volume: Mapping[str, Any], job: Mapping[str, Any], **changes: Any) -> Object:
    spec = profile(volumes=[volume], allow={"volumes": ["v"]}, **changes)
    request = backend(spec).render(planned(**{**JOB, **job}), Attempt(1))
    return dict(request.objects[-1])


def is_fenced(batch_job: Object) -> bool:
    annotations = batch_job["spec"]["template"]["metadata"]["annotations"]
    found = bool(annotations.get(FENCED_ANNOTATION) == "true")
    assert bool(facts_of(batch_job).unreachable_seconds) == found
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"persistentVolumeClaim": {"claimName": "c"}}, True),
        ({"nfs": {"server": "nfs.test", "path": "/"}}, True),
        ({"azureFile": {"secretName": "s", "shareName": "share"}}, True),
        ({"csi": {"driver": "blob.csi.azure.com"}}, True),
        ({"csi": {"driver": "file.csi.azure.com"}}, True),
        ({"csi": {"driver": "disk.csi.azure.com"}}, False),
        ({"csi": {"driver": "local.csi.azure.com"}}, False),
        ({"hostPath": {"path": "/data"}}, False),
        ({"emptyDir": {}}, True),
    ],
)
def test_storage_of_a_volume_decides_unless_the_profile_does(
    source: Object, expected: bool
) -> None:
    volume = {"name": "v", "mountPath": "/v", "source": source}
    assert is_fenced(batch_job_on(volume, ON_VOLUME)) == expected
    assert is_fenced(batch_job_on(volume, {}))
    assert not is_fenced(batch_job_on({**volume, "shared": False}, ON_VOLUME))
    if "emptyDir" not in source:
        assert is_fenced(batch_job_on({**volume, "shared": True}, ON_VOLUME))


def test_a_profile_sets_when_a_silent_node_counts_as_lost() -> None:
    volume = {"name": "v", "mountPath": "/v", "source": {"emptyDir": {}}}
    assert facts_of(batch_job_on(volume, {})).unreachable_seconds == 60
    slow = batch_job_on(volume, {}, nodes={"unreachableSeconds": 300})
    assert facts_of(slow).unreachable_seconds == 300


@pytest.mark.parametrize(
    ("change", "path", "sentence"),
    [
        pytest.param(
            {"volumes": [{"name": "v", "mountPath": "/v", "shared": True, "source": {kind: {}}}]},
            "spec.volumes[0]",
            "must not set shared to true for an emptyDir or ephemeral volume, since each pod has "
            "its own",
            id=kind,
        )
        for kind in ("emptyDir", "ephemeral")
    ]
    + [
        pytest.param(
            {"nodes": {"unreachableSeconds": 29}},
            "spec.nodes.unreachableSeconds",
            "must be at least 30",
            id="too short",
        )
    ],
)
def test_a_setting_that_cannot_work_is_refused(
    change: Mapping[str, Any], path: str, sentence: str, tmp_path: Path
) -> None:
    known = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
    spec = {**known, **change}
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile"}
    documents = [{**head, "metadata": {"name": "default"}, "spec": spec}, manifest(**JOB)]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all(json.loads(json.dumps(documents))))
    out = CliRunner().invoke(app, ["validate", str(file)])
    assert out.exit_code == 1
    assert path in out.stdout
    assert sentence in " ".join(out.stdout.split())
