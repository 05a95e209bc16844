"""kubectl, unmodified, from apply to delete; the same words on the embedded and the real server."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from finetune_operator.api.crd import job_schema
from finetune_operator.kube.resources import CONFIG_MAPS, EVENTS, FINE_TUNE_JOBS, Object
from support.api.builders import manifest
from support.cluster.operators import Api, wait_until

KUBECTL = shutil.which("kubectl")

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not in PATH")


class Kubectl:
    """kubectl in one namespace, with the discovery cache of its own cluster."""

    def __init__(self, api: Api, namespace: str, cache: Path) -> None:
        self.api, self.namespace = api, namespace
        folder = f"--cache-dir={cache}"
        self._start = [str(KUBECTL), f"--kubeconfig={api.kubeconfig}", f"-n{namespace}", folder]

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [*self._start, *arguments]

    def __call__(self, *arguments: str, sent: Object | None = None) -> str:
        """Return what it printed; raises if it failed."""
        done = self._run(arguments, sent)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def complaint(self, *arguments: str, sent: Object | None = None) -> str:
        """Return what it printed as it failed."""
        done = self._run(arguments, sent)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def _run(
        self, arguments: Sequence[str], sent: Object | None
    ) -> subprocess.CompletedProcess[str]:
        text = json.dumps(sent) if sent else None
        given = ["-f", "-"] if sent else []
        command = self.command([*arguments, *given])
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)

    def job(self, name: str) -> Object:
        made = self.api.job(self.namespace, name)
        assert made is not None
        return made

    def owner(self, name: str) -> Object:
        """Return the owner reference of what belongs to a job."""
        kind = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob"}
        return {**kind, "name": name, "uid": self.job(name)["metadata"]["uid"]}

    def say(self, name: str, **status: object) -> None:
        """Write a status, as the operator would."""
        patch = {"status": status}
        work = self.api.client.patch(
            FINE_TUNE_JOBS, name, self.namespace, patch, subresource="status"
        )
        self.api.run(work)


@pytest.fixture(scope="module")
def kubectl(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with api.namespace("kubectl") as namespace:
        yield Kubectl(api, namespace, tmp_path_factory.mktemp("cache"))


def job(name: str, **overrides: object) -> Object:
    made = manifest(name=name, **overrides)
    made["metadata"].pop("namespace")
    return made


def columns(text: str) -> list[dict[str, str]]:
    """Read a table as the columns of its header cut it."""
    header, *rows = text.splitlines()
    names = header.split()
    starts = [header.index(name) for name in names]
    ends = [*starts[1:], None]
    return [
        {name: row[a:b].strip() for name, a, b in zip(names, starts, ends, strict=True)}
        for row in rows
    ]


def test_apply_creates_then_leaves_alone_then_changes(kubectl: Kubectl) -> None:
    assert kubectl("apply", sent=job("apply")) == "finetunejob.finetune.dev/apply created\n"
    assert kubectl("apply", sent=job("apply")) == "finetunejob.finetune.dev/apply unchanged\n"
    longer = job("apply", ttlSecondsAfterFinished=60)
    assert kubectl("apply", sent=longer) == "finetunejob.finetune.dev/apply configured\n"
    made = kubectl.job("apply")
    assert (made["spec"]["ttlSecondsAfterFinished"], made["metadata"]["generation"]) == (60, 2)
    kubectl("apply", sent=job("apply"))
    assert "ttlSecondsAfterFinished" not in kubectl.job("apply")["spec"]


def test_apply_is_refused_by_the_server_with_the_field_and_the_sentence(kubectl: Kubectl) -> None:
    unknown = kubectl.complaint("apply", sent=job("bad", trainng={}))
    assert 'strict decoding error: unknown field "spec.trainng"' in unknown
    ruled = kubectl.complaint("apply", sent=job("bad", model__source="nowhere"))
    assert 'The FineTuneJob "bad" is invalid: spec.model.source: Invalid value: ' in ruled
    assert "must start with hf://" in ruled
    assert kubectl.complaint("get", "ftj", "bad").endswith('"bad" not found\n')


def test_get_shows_the_columns_of_the_crd_and_selects_by_label(kubectl: Kubectl) -> None:
    made = job("shown")
    made["metadata"]["labels"] = {"team": "a"}
    kubectl("apply", sent=made)
    kubectl.say("shown", phase="Running", progress={"step": 3, "totalSteps": 9, "loss": 1.25})
    (row,) = columns(kubectl("get", "ftj", "-l", "team=a"))
    assert row.pop("AGE")
    assert row == {
        "NAME": "shown", "PHASE": "Running", "REASON": "Pending", "STEP": "3", "STEPS": "9",
        "LOSS": "1.25", "NODES": "0", "RESTARTS": "0", "ETA-SECONDS": "",
    }  # fmt: skip
    (wide,) = columns(kubectl("get", "finetunejobs", "shown", "-o", "wide"))
    assert wide["BACKEND"] == "local"
    assert "finetunejob.finetune.dev/shown" in kubectl("get", "all")
    assert kubectl("get", "ftj", "-l", "team=b") == ""


def test_get_w_prints_a_line_for_each_change(kubectl: Kubectl) -> None:
    kubectl("apply", sent=job("watched"))
    command = kubectl.command(["get", "ftj", "watched", "-w"])
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(watch.stdout or ()))
        reader.start()
        try:
            for step in range(1, 4):
                # The watch may begin later than the status is written: the list then shows it.
                kubectl.say("watched", phase="Running", progress={"step": step, "totalSteps": 9})
                wait_until(lambda: any(step == _step(line) for line in lines[1:]), 20)  # noqa: B023
        finally:
            watch.terminate()
            reader.join(20)
    assert lines[0].split()[:3] == ["NAME", "PHASE", "REASON"]
    assert [line for line in lines[1:] if line.startswith("NAME")] == []


def _step(line: str) -> int:
    words = line.split()
    return int(words[3]) if words[1] == "Running" else 0


def test_describe_tells_the_spec_the_status_and_the_events(kubectl: Kubectl) -> None:
    kubectl("apply", sent=job("told"))
    uid = kubectl.job("told")["metadata"]["uid"]
    about = {"kind": "FineTuneJob", "name": "told", "namespace": kubectl.namespace, "uid": uid}
    event = {
        "metadata": {"generateName": "told-"}, "involvedObject": about, "type": "Normal",
        "reason": "Training", "message": "3 of 9 steps", "source": {"component": "tests"},
        "count": 1, "firstTimestamp": None, "lastTimestamp": None,
    }  # fmt: skip
    kubectl.api.run(kubectl.api.client.create(EVENTS, event, kubectl.namespace))
    told = kubectl("describe", "ftj", "told")
    assert "API Version:  finetune.dev/v1alpha1" in told
    assert "Global Batch Size:  " in told
    assert re.search("Message: +waiting for the controller", told)
    assert "Training" in told
    assert told.rstrip().endswith("3 of 9 steps")


def test_explain_prints_the_description_of_a_field(kubectl: Kubectl) -> None:
    explained = kubectl("explain", "ftj.spec.topology.nodes")
    assert "FIELD: nodes <integer>" in explained
    description = job_description("topology", "nodes")
    assert " ".join(description.split()) in " ".join(explained.split())


def job_description(*path: str) -> str:
    schema = job_schema()["properties"]["spec"]
    for part in path:
        schema = schema["properties"][part]
    return str(schema["description"])


def test_wait_returns_once_the_condition_is_true(kubectl: Kubectl) -> None:
    kubectl("apply", sent=job("waited"))
    command = kubectl.command(["wait", "ftj/waited", "--for=condition=Complete", "--timeout=30s"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as wait:
        done = {"type": "Complete", "status": "True", "reason": "Completed"}
        # kubectl believes no condition of an older generation.
        kubectl.say("waited", phase="Succeeded", conditions=[done], observedGeneration=1)
        said, _ = wait.communicate(timeout=60)
    assert said == "finetunejob.finetune.dev/waited condition met\n"
    late = kubectl.complaint("wait", "ftj/waited", "--for=condition=Failed", "--timeout=1s")
    assert "timed out" in late


def test_scale_patch_and_edit_change_the_spec(kubectl: Kubectl) -> None:
    kubectl("apply", sent=job("changed"))
    kubectl("scale", "ftj", "changed", "--replicas=2")
    assert kubectl.job("changed")["spec"]["topology"]["nodes"] == 2
    kubectl("patch", "ftj", "changed", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    assert kubectl.job("changed")["spec"]["suspend"] is True
    replace = [{"op": "replace", "path": "/spec/suspend", "value": False}]
    kubectl("patch", "ftj", "changed", "--type=json", "-p", json.dumps(replace))
    assert kubectl.job("changed")["spec"]["suspend"] is False
    wrong = [{"op": "test", "path": "/spec/suspend", "value": True}]
    kubectl.complaint("patch", "ftj", "changed", "--type=json", "-p", json.dumps(wrong))
    kubectl("annotate", "ftj", "changed", "note=one")
    edited = kubectl.job("changed")
    edited["spec"]["ttlSecondsAfterFinished"] = 5
    assert kubectl("replace", sent=edited) == "finetunejob.finetune.dev/changed replaced\n"
    stale = kubectl.complaint("replace", sent=edited)
    assert "the object has been modified; please apply your changes to the latest" in stale
    made = kubectl.job("changed")
    assert made["metadata"]["annotations"]["note"] == "one"
    assert made["spec"]["ttlSecondsAfterFinished"] == 5


def test_server_side_apply_owns_removes_and_is_forced(kubectl: Kubectl) -> None:
    ours = ("apply", "--server-side")
    first = job("owned", ttlSecondsAfterFinished=5, suspend=True)
    assert kubectl(*ours, sent=first) == "finetunejob.finetune.dev/owned serverside-applied\n"
    kubectl(*ours, sent=job("owned", suspend=True))
    assert "ttlSecondsAfterFinished" not in kubectl.job("owned")["spec"]
    flux = (*ours, "--field-manager=flux")
    conflict = kubectl.complaint(*flux, sent=job("owned", suspend=False))
    assert 'conflict with "kubectl": .spec.suspend' in conflict
    kubectl(*flux, "--force-conflicts", sent=job("owned", suspend=False))
    assert kubectl.job("owned")["spec"]["suspend"] is False
    before = kubectl.job("owned")["metadata"]["resourceVersion"]
    kubectl(*flux, "--force-conflicts", sent=job("owned", suspend=False))
    assert kubectl.job("owned")["metadata"]["resourceVersion"] == before


def test_a_core_kind_is_applied_and_patched_as_well(kubectl: Kubectl) -> None:
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "core"}}
    kubectl("apply", sent={**made, "data": {"a": "1", "b": "2"}})
    assert kubectl("apply", sent={**made, "data": {"a": "1"}}) == "configmap/core configured\n"
    kubectl("patch", "cm", "core", "-p", '{"data":{"c":"3"}}')
    there = kubectl.api.get(CONFIG_MAPS, kubectl.namespace, "core")
    assert there is not None
    assert there["data"] == {"a": "1", "c": "3"}


def test_delete_waits_until_finalizers_are_gone_and_takes_what_was_owned(kubectl: Kubectl) -> None:
    kubectl("apply", sent=job("gone"))
    kubectl("patch", "ftj", "gone", "--type=merge", "-p", '{"metadata":{"finalizers":["a.b/c"]}}')
    owner = kubectl.owner("gone")
    child = {"metadata": {"name": "child", "ownerReferences": [owner]}}
    kubectl.api.run(kubectl.api.client.create(CONFIG_MAPS, child, kubectl.namespace))
    with subprocess.Popen(
        kubectl.command(["delete", "ftj", "gone"]), stdout=subprocess.PIPE, text=True
    ) as deletion:
        wait_until(lambda: "deletionTimestamp" in kubectl.job("gone")["metadata"], 20)
        assert kubectl.api.get(CONFIG_MAPS, kubectl.namespace, "child") is not None
        kubectl("patch", "ftj", "gone", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        said, _ = deletion.communicate(timeout=60)
    assert said.startswith('finetunejob.finetune.dev "gone" deleted')
    wait_until(lambda: kubectl.api.get(CONFIG_MAPS, kubectl.namespace, "child") is None, 30)


def test_a_foreground_deletion_ends_after_what_was_owned(kubectl: Kubectl) -> None:
    kubectl("apply", sent=job("last"))
    owner = {**kubectl.owner("last"), "blockOwnerDeletion": True}
    held = {"name": "first", "finalizers": ["a.b/c"], "ownerReferences": [owner]}
    client, namespace = kubectl.api.client, kubectl.namespace
    kubectl.api.run(client.create(CONFIG_MAPS, {"metadata": held}, namespace))
    kubectl("delete", "ftj", "last", "--cascade=foreground", "--wait=false")

    def is_marked() -> bool:
        there = kubectl.api.get(CONFIG_MAPS, namespace, "first")
        return there is not None and "deletionTimestamp" in there["metadata"]

    wait_until(is_marked, 30)
    assert kubectl.job("last")["metadata"]["finalizers"] == ["foregroundDeletion"]
    free = {"metadata": {"finalizers": None}}
    kubectl.api.run(client.patch(CONFIG_MAPS, "first", namespace, free))
    wait_until(lambda: kubectl.api.job(namespace, "last") is None, 30)
