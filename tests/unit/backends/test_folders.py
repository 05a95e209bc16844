"""Which folders jobs write, where these really are, and which of them are one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import BackendContext, Written
from finetune_operator.backends.folder_index import FolderIndex
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.cli.app import app
from support.api.builders import job, manifest
from support.kubernetes.kubernetes_cases import JOB, backend, profile

CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}
DISK = {"hostPath": {"path": "/data/./models/"}}
SHARE = {"nfs": {"server": "files", "path": "/data"}}
BLOB = {
    "csi": {
        "driver": "blob.csi.azure.com",
        "volumeAttributes": {"storageAccount": "one", "containerName": "c", "mountOptions": "-x"},
    }
}
SAME_BLOB = {
    "csi": {
        "driver": "blob.csi.azure.com",
        "volumeAttributes": {"containername": "c", "storageaccount": "one", "secretName": "k"},
    }
}


def with_volume(source: Mapping[str, Any], name: str = "vol", **fields: str) -> KubernetesBackend:
    volume = {"name": name, "mountPath": f"/mnt/{name}", "source": source, **fields}
    return backend(profile(volumes=[volume], allow={"volumes": ["*"]}))


def output(uri: str, namespace: str = "team") -> FineTuneJob:
    uris = {"output__uri": uri, "checkpoint__uri": None}
    return job(**{**JOB, **uris, "metadata.namespace": namespace})


def do_touch(
    first: tuple[KubernetesBackend, FineTuneJob], second: tuple[KubernetesBackend, FineTuneJob]
) -> bool:
    index = FolderIndex[int]()
    for number, (made, one) in enumerate((first, second)):
        index.put(number, made.writes(one))
    made, one = second
    return any(list(index.touching(mine, besides=1)) for mine in made.writes(one))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param("pvc://c/x", "pvc://c/x", True, id="the same"),
        pytest.param("pvc://c/x", "pvc://c//x/", True, id="slashes"),
        pytest.param("pvc://c/x", "pvc://c/./x", True, id="dots"),
        pytest.param("pvc://c/x", "pvc://c/x/run", True, id="inside"),
        pytest.param("pvc://c/x/run", "pvc://c/x", True, id="around"),
        pytest.param("pvc://c", "pvc://c/x", True, id="the whole claim"),
        pytest.param("pvc://c/x", "pvc://c/xy", False, id="a longer name"),
        pytest.param("pvc://c/x", "pvc://d/x", False, id="another claim"),
        pytest.param("pvc://c/{name}", "pvc://c/tiny/y", True, id="a placeholder"),
    ],
)
def test_two_paths_of_claims_are_compared_by_what_they_are(
    first: str, second: str, expected: bool
) -> None:
    here = backend()
    assert do_touch((here, output(first)), (here, output(second))) is expected
    assert do_touch((here, output(second)), (here, output(first))) is expected
    assert not do_touch((here, output(first)), (here, output(second, "other")))


@pytest.mark.parametrize(
    ("volume", "other", "is_everybodys"),
    [
        pytest.param(CLAIM, CLAIM, False, id="a claim is its namespace's"),
        pytest.param(DISK, {"hostPath": {"path": "/data/models"}}, True, id="hostPath"),
        pytest.param(SHARE, SHARE, True, id="NFS"),
        pytest.param(BLOB, SAME_BLOB, True, id="a Blob container, however it is mounted"),
    ],
)
def test_volumes_of_two_profiles_are_compared_by_their_source(
    volume: Mapping[str, Any], other: Mapping[str, Any], is_everybodys: bool
) -> None:
    first = (with_volume(volume), output("pvc://vol/x"))
    for namespace, expected in (("team", True), ("other", is_everybodys)):
        second = (with_volume(other, "mine"), output("pvc://mine/x/y", namespace))
        assert do_touch(first, second) is expected


def test_a_claim_and_a_volume_of_that_claim_are_one() -> None:
    assert do_touch(
        (with_volume(CLAIM), output("pvc://vol/x")), (backend(), output("pvc://shared/x"))
    )


def test_a_path_below_a_disk_meets_the_path_that_another_volume_begins_at() -> None:
    deep = with_volume({"hostPath": {"path": "/data/models/x"}})
    assert do_touch((with_volume(DISK), output("pvc://vol/x/y")), (deep, output("pvc://vol/y")))


@pytest.mark.parametrize(
    ("uri", "namespace", "sub_path", "expected"),
    [
        pytest.param("pvc://vol/x", "team", "{namespace}", False, id="the same path"),
        pytest.param("pvc://vol/x/y", "other", "{namespace}", True, id="the same namespace"),
        pytest.param("pvc://vol/other/x", "team", None, True, id="from the root"),
        pytest.param("pvc://vol/x", "team", "other", True, id="a fixed folder"),
    ],
)
def test_folders_of_namespaces_on_one_volume_are_compared_below_their_sub_paths(
    uri: str, namespace: str, sub_path: str | None, expected: bool
) -> None:
    first = (with_volume(SHARE, subPath="{namespace}"), output("pvc://vol/x", "other"))
    fields = {} if sub_path is None else {"subPath": sub_path}
    second = (with_volume(SHARE, **fields), output(uri, namespace))
    assert do_touch(first, second) is expected
    assert do_touch(second, first) is expected


def test_what_ends_with_its_pod_is_shared_with_nobody() -> None:
    made = with_volume({"emptyDir": {}})
    assert not do_touch((made, output("pvc://vol/x")), (made, output("pvc://vol/x")))


def test_a_job_that_only_reads_a_folder_does_not_write_it() -> None:
    reads = {
        "model__source": "pvc://c/x",
        "dataset__source": "pvc://c/x/rows.jsonl",
        "checkpoint__resume_from": "pvc://c/x/step-3",
        "output__uri": "pvc://m/y",
    }
    reader = job(**{**JOB, **reads, "metadata.namespace": "team"})
    assert not do_touch((backend(), output("pvc://c/x")), (backend(), reader))


def test_on_this_machine_links_are_followed_and_the_run_directory_counts(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    local = LocalBackend(BackendContext(tmp_path))
    fields = {"checkpoint__uri": "file://./link/../link//x", "backend.local.runDirectory": "mine"}
    run, checkpoint = local.writes(job(**fields))
    assert run.place == ("disk", *(tmp_path / "mine").resolve().parts)
    assert checkpoint == Written(
        "spec.checkpoint.uri",
        "file://./link/../link//x",
        ("disk", *(tmp_path / "real" / "x").resolve().parts),
    )
    assert not local.writes(job(output__uri="pvc://c/x"))  # refused for it


def test_who_is_gone_is_forgotten() -> None:
    index, one = FolderIndex[int](), Written("output.uri", "x", ("a", "b", "c"))
    index.put(1, [one, Written("checkpoint.uri", "y", ("a",))])
    index.put(1, [one])
    assert list(index.touching(Written("", "", ("a", "b")), besides=2)) == [(1, one)]
    index.remove(1)
    assert not list(index.touching(Written("", "", ("a", "b")), besides=2))
    assert index.is_empty


def told(*files: Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["validate", *(f"-f{file}" for file in files)])
    return result.exit_code, [line for line in result.output.splitlines() if "one writer" in line]


def test_validate_warns_of_two_manifests_that_share_a_folder(tmp_path: Path) -> None:
    place = {"checkpoint__uri": "file:///data/x", "output__uri": "file:///data/out"}
    first = manifest(name="first", **place)
    second = manifest(name="second", **place | {"checkpoint__uri": "file:///data/x/y"})
    (tmp_path / "b.yaml").write_text(yaml.safe_dump_all([first, second]))
    code, (inside, same) = told(tmp_path / "b.yaml")
    assert code == 0
    assert f"{tmp_path}/b.yaml:" in inside
    assert "file:///data/x/y is inside file:///data/x, spec.checkpoint.uri of" in inside
    assert "spec.output.uri file:///data/out is also spec.output.uri of default/first in" in same
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(first))
    assert len(told(tmp_path)[1]) == 2  # two of one name are one job
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(manifest(name="third", **place)))
    assert len(told(tmp_path / "a.yaml", tmp_path / "b.yaml")[1]) == 2
    named = {field: "file:///data/{name}" + field for field in place}
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(manifest(name=name, **named)))
    assert told(tmp_path / "first.yaml", tmp_path / "second.yaml") == (0, [])
