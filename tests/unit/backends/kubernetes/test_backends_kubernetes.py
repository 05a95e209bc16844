"""The kubernetes backend without a cluster: what it creates, refuses and reads."""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import Severity
from finetune_operator.api.v1alpha1 import FineTuneProfile
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.child_names import PROFILE_ANNOTATION
from finetune_operator.backends.kubernetes.quantity import amount
from finetune_operator.backends.kubernetes.reasons import from_events
from finetune_operator.backends.kubernetes.volumes import output_uri
from finetune_operator.cli.app import app
from finetune_operator.errors import BackendError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, JOBS, Object
from finetune_trainer.config import TrainConfig
from support.api.builders import job, manifest, planned
from support.kubernetes.kubernetes_cases import CASES, GOLDENS, JOB, Case, backend, profile


@pytest.mark.parametrize("name", CASES)
def test_what_is_created_is_what_the_golden_shows(name: str) -> None:
    golden = (GOLDENS / f"{name}.yaml").read_text()
    assert CASES[name].text() == golden, (
        "look at the change, then run: "
        "PYTHONPATH=tests python tests/support/kubernetes/kubernetes_cases.py"
    )


def test_every_golden_is_of_a_job_that_its_profile_allows() -> None:
    for name, case in CASES.items():
        made = job(**{**JOB, **case.job})
        assert backend(profile(**case.profile)).validate(made) == [], name


def test_only_the_profile_knows_the_memory_of_a_part_of_a_gpu() -> None:
    size = "Standard_NC24ads_A100_v4"
    offered = {"nodes": {"instanceTypes": [size]}}
    slices = {"resources": {"gpu": "nvidia.com/mig-1g.10gb"}}

    def memory(changes: Mapping[str, Any], **topology: Any) -> list[float]:
        small = job(**{**JOB, "topology": {"gpusPerNode": 1, **topology}})
        return [one.usable_gib for one in backend(profile(**changes)).gpu_sizes(small)]

    assert memory(offered) == [79.1]
    assert memory({**offered, **slices}) == []
    assert memory({**offered, **slices}, instanceType=size) == []
    assert memory({"nodes": {"gpuMemoryGiB": 9.5}, **slices}) == [9.5]


def pod_of(name: str, attempt: int = 1) -> Object:
    """Return the pod template of a case."""
    made: Object = CASES[name].request().objects[-1]["spec"]["template"]
    return made


def command_of(**changes: Any) -> list[str]:
    """Return what the container of a profile with these fields runs."""
    made = backend(profile(**changes)).render(planned(**JOB), Attempt(1)).objects[-1]
    return list(made["spec"]["template"]["spec"]["containers"][0]["command"])


def test_the_trainer_runs_below_the_lines_of_sh_or_what_the_profile_names() -> None:
    trainer = ["python", "-m", "finetune_trainer", "/etc/finetune/config.json"]
    shell, option, lines, name, *command = command_of()
    assert (shell, option, name, command) == ("sh", "-c", "init", trainer)
    assert not re.search(r"\$[$(]", lines), "the kubelet would change that"
    assert command_of(init=["tini", "--"]) == ["tini", "--", *trainer]
    assert command_of(init=[]) == trainer


def test_the_configuration_reaches_the_trainer_as_it_reads_it() -> None:
    text = pod_of("two-nodes-spot")["metadata"]["annotations"]["finetune.dev/config"]
    config = TrainConfig.model_validate_json(text)
    assert (config.world.nnodes, config.world.nproc_per_node) == (2, 8)
    assert config.world.threads_per_process == 6  # 48 cores for 8 ranks
    assert config.data.train.path == "/mnt/data/train.jsonl"
    assert config.checkpoint.dir == "/mnt/checkpoints/tiny"
    assert config.checkpoint.is_continued
    assert config.control.scheduled_events_url is not None


def test_the_profile_alone_says_whether_another_jobs_checkpoint_is_loaded() -> None:
    resumed = {**JOB, "checkpoint__resumeFrom": "pvc://checkpoints/old/step-9"}
    asked = {**resumed, "checkpoint__allowForeign": True}
    for allowed in (True, False):
        made = backend(profile(allow={"foreignCheckpoints": allowed}))
        for spec in (resumed, asked) if allowed else (resumed,):
            (*_, batch_job) = made.render(planned(**spec), Attempt(1)).objects
            annotations = batch_job["spec"]["template"]["metadata"]["annotations"]
            config = TrainConfig.model_validate_json(annotations["finetune.dev/config"])
            assert config.checkpoint.allow_foreign is allowed
        said = [str(problem) for problem in made.validate(job(**asked))]
        refusal = (
            "spec.checkpoint.allowForeign true is not allowed by profile default; remove it, or "
            "have the profile's allow.foreignCheckpoints set"
        )
        assert said == ([] if allowed else [refusal])
        assert made.validate(job(**resumed)) == []


def test_no_python_of_a_pod_imports_from_the_images_working_directory() -> None:
    for name in CASES:
        (container,) = pod_of(name)["spec"]["containers"]
        assert {"name": "PYTHONSAFEPATH", "value": "1"} in container["env"]


def test_no_pod_holds_a_token_of_the_cluster_or_may_become_root() -> None:
    for name in CASES:
        spec = pod_of(name)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        added = container["securityContext"]["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if name.startswith("rdma") else [])


def test_metrics_are_open_to_the_operator_in_the_namespace_it_is_in() -> None:
    environ = {"FINETUNE_OPERATOR_LEASE_NAMESPACE": "ml-platform"}
    made = FineTuneProfile.model_validate(
        {"metadata": {"name": "default"}, "spec": profile().model_dump(by_alias=True)}
    )
    context = BackendContext(Path(), environ, profiles={"default": made})
    policy = KubernetesBackend(context).render(planned(**JOB), Attempt(1)).objects[0]
    operator = policy["spec"]["ingress"][1]["from"][0]
    assert operator == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ml-platform"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "finetune-operator"}},
    }


def test_a_configuration_that_no_pod_can_hold_is_refused_with_what_to_shorten() -> None:
    long = {"model__chatTemplate": "é" * 65_536, "model__addTokens": ["é" * 128] * 256}
    plan = planned(**{**JOB, **long, "observability__samplePrompts": ["é" * 4096] * 4})
    with pytest.raises(BackendError, match=r"at most 204800 reach a pod; shorten model\.chat"):
        backend().render(plan, Attempt(1))


def test_what_was_exported_comes_back_by_the_uri_of_its_folder() -> None:
    place = ("pvc://blob/tiny/", "/big/disk/tiny")
    assert output_uri("/big/disk/tiny/adapter", *place) == "pvc://blob/tiny/adapter"
    assert output_uri("file:///big/disk/tiny", *place) == "pvc://blob/tiny"
    assert output_uri("/big/disk/tiny-2", *place) == "/big/disk/tiny-2"


BLOB = {"csi": {"driver": "blob.csi.azure.com", "volumeAttributes": {"containerName": "models"}}}


def with_volumes(**given: Mapping[str, Any]) -> KubernetesBackend:
    """Return the backend with volumes in its profile, by name, each mounted below /vol."""
    made = [{"name": name, "mountPath": f"/vol/{name}", **one} for name, one in given.items()]
    return backend(profile(volumes=made, allow={"claims": ["checkpoints"], "volumes": ["*"]}))


def test_a_job_names_volumes_of_its_profile_whatever_they_are() -> None:
    given = with_volumes(
        rows={"source": {"hostPath": {"path": "/data"}}, "readOnly": True},
        base={"source": {"emptyDir": {}}},
        blob={"source": BLOB},
    )
    named = {
        "model__source": "pvc://base/llama",
        "dataset": {"source": "pvc://rows/train.jsonl", "evalSource": "pvc://rows/eval.jsonl"},
        "output__uri": "pvc://blob/tiny",
        "checkpoint": {"uri": "pvc://checkpoints/tiny", "resumeFrom": "pvc://blob/old/step-9"},
    }
    plan = planned(**{**JOB, **named})
    assert given.validate(plan.job) == []
    batch_job = given.render(plan, Attempt(1)).objects[-1]
    template = batch_job["spec"]["template"]
    text = template["metadata"]["annotations"]["finetune.dev/config"]
    config = TrainConfig.model_validate_json(text)
    assert config.model.path == "/vol/base/llama"
    assert config.data.train.path == "/vol/rows/train.jsonl"
    assert config.data.eval is not None
    assert config.data.eval.path == "/vol/rows/eval.jsonl"
    assert config.checkpoint.dir == "/mnt/checkpoints/tiny"
    assert config.checkpoint.resume_from == "/vol/blob/old/step-9"
    assert config.output.dir == "/vol/blob/tiny"
    # None is mounted a second time as a claim of its name.
    (container,) = template["spec"]["containers"]
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    assert mounts[4:] == ["/vol/rows", "/vol/base", "/vol/blob", "/mnt/checkpoints"]
    assert len(template["spec"]["volumes"]) == 3 + 4


def test_a_volume_of_the_profile_is_not_every_jobs() -> None:
    made = [{"name": "blob", "mountPath": "/vol", "source": BLOB}]
    for_all_claims = backend(profile(volumes=made, allow={"claims": ["*"], "volumes": ["rows"]}))
    (found,) = for_all_claims.validate(job(**{**JOB, "model__source": "pvc://blob/llama"}))
    assert str(found) == (
        "spec.model.source blob is a volume that the profile does not allow (allowed: rows); "
        "name another"
    )


READ_ONLY = "which is read-only"
LOST = "which is separate for each pod and deleted with it"
ELSE = "name another volume, or a claim"


@pytest.mark.parametrize(
    ("volume", "job_changes", "severity", "says"),
    [
        pytest.param(
            {"source": BLOB, "readOnly": True},
            {"output__uri": "pvc://v/a"},
            Severity.ERROR,
            f"spec.output.uri pvc://v/a is on volume v of profile default, {READ_ONLY}; {ELSE}",
            id="output where nothing can be written",
        ),
        pytest.param(
            {"source": {"nfs": {"server": "x", "path": "/", "readOnly": True}}},
            {"checkpoint__uri": "pvc://v/a"},
            Severity.ERROR,
            f"spec.checkpoint.uri pvc://v/a is on volume v of profile default, {READ_ONLY}; {ELSE}",
            id="checkpoints where the source says read-only",
        ),
        pytest.param(
            {"source": {"configMap": {"name": "x"}}},
            {"output__uri": "pvc://v"},
            Severity.ERROR,
            f"spec.output.uri pvc://v is on volume v of profile default, {READ_ONLY}; {ELSE}",
            id="output in a ConfigMap",
        ),
        pytest.param(
            {"source": {"emptyDir": {}}},
            {"output__uri": "pvc://v/a"},
            Severity.ERROR,
            f"spec.output.uri pvc://v/a is on volume v of profile default, {LOST}; {ELSE}",
            id="output that is lost with the pod",
        ),
        pytest.param(
            {"source": {"emptyDir": {}}},
            {"checkpoint__uri": "pvc://v/a"},
            Severity.WARNING,
            f"spec.checkpoint.uri pvc://v/a is on volume v of profile default, {LOST}, so every "
            f"restart starts over; {ELSE}",
            id="checkpoints that are lost with the pod",
        ),
        pytest.param(
            {"source": {"ephemeral": {}}},
            {"checkpoint__uri": "pvc://v/a", "topology__nodes": 2},
            Severity.ERROR,
            f"spec.checkpoint.uri pvc://v/a is on volume v of profile default, {LOST}; {ELSE}",
            id="checkpoints that two nodes do not share",
        ),
    ],
)
def test_what_is_written_must_reach_a_volume_that_outlives_the_pod(
    volume: Mapping[str, Any], job_changes: Mapping[str, Any], severity: Severity, says: str
) -> None:
    made = [{"name": "v", "mountPath": "/vol", **volume}]
    (found,) = backend(profile(volumes=made, allow={"volumes": ["v"]})).validate(
        job(**{**JOB, **job_changes})
    )
    assert (str(found), found.severity) == (says, severity)


ROOT = "is the root of volume v of profile default, which no single job may use; name a folder,"


def test_the_root_of_a_volume_is_refused_unless_the_job_has_a_checkpoint_there() -> None:
    volume = {"name": "v", "mountPath": "/vol", "source": BLOB}
    backed = backend(profile(volumes=[volume], allow={"volumes": ["v"]}))
    uris = {"output__uri": "pvc://v", "checkpoint__uri": "pvc://v/./"}
    last = {"step": 3, "uri": "pvc://v/step-3", "time": "2026-01-01T00:00:00Z", "worldSize": 1}
    old = {"status.checkpoint.last": last}
    for status, severity in ({}, Severity.ERROR), (old, Severity.WARNING):
        named = job(**{**JOB, **uris, **status})
        found = {str(one): one.severity for one in backed.validate(named)}
        assert found == {
            f"spec.output.uri pvc://v {ROOT} such as pvc://v/{{name}}/output": severity,
            f"spec.checkpoint.uri pvc://v/./ {ROOT} such as pvc://v/{{name}}/checkpoint": severity,
        }


LIMITS: Mapping[str, Any] = {
    "requireQueue": True,
    "maxTerminationGraceSeconds": 60,
    "maxEmptyDir": "1Gi",
}


def with_empty_dir(**source: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"volumes": [{"name": "own", "emptyDir": source}]}}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(
            {"queue": None},
            "spec.queue is missing, and profile default requires a queue; name a LocalQueue of the "
            "namespace",
            id="no queue",
        ),
        pytest.param(
            {"deadlines": {"terminationGraceSeconds": 61}},
            "spec.deadlines.terminationGraceSeconds 61 is more than the 60 that profile default "
            "allows; use at most 60",
            id="a long grace period",
        ),
        pytest.param(
            with_empty_dir(),
            "spec.podTemplate.spec.volumes[0].emptyDir.sizeLimit is missing; set at most 1Gi "
            "(allow.maxEmptyDir)",
            id="no size",
        ),
        pytest.param(
            with_empty_dir(medium="Memory", sizeLimit="1025Mi"),
            "spec.podTemplate.spec.volumes[0].emptyDir.sizeLimit 1025Mi is more than the 1Gi that "
            "the profile allows; use less",
            id="a large size",
        ),
        pytest.param(
            with_empty_dir(sizeLimit="many"),
            "spec.podTemplate.spec.volumes[0].emptyDir.sizeLimit many is not a valid amount",
            id="not a size",
        ),
    ],
)
def test_limits_of_a_profile_hold_for_jobs_without_a_checkpoint(
    overrides: dict[str, Any], expected: str
) -> None:
    limited = backend(profile(allow=LIMITS))
    allowed = {"queue": {"name": "q"}, "deadlines": {"terminationGraceSeconds": 60}}
    assert limited.validate(job(**{**JOB, **allowed, **with_empty_dir(sizeLimit=1024)})) == []
    (found,) = limited.validate(job(**{**JOB, **allowed, **overrides}))
    assert str(found).startswith(expected)
    assert found.severity is Severity.ERROR
    last = {"step": 3, "uri": "pvc://checkpoints/a", "time": "2026-01-01T00:00:00Z", "worldSize": 1}
    resumed = job(**{**JOB, **allowed, **overrides, "status.checkpoint.last": last})
    assert [one.severity for one in limited.validate(resumed)] == [Severity.WARNING]
    assert backend(profile()).validate(job(**{**JOB, **allowed, **overrides})) == []


def test_pods_of_a_namespace_mount_its_own_folder_of_a_shared_volume() -> None:
    volume = {"name": "v", "mountPath": "/vol", "source": BLOB, "subPath": "a/{namespace}/b"}
    backed = backend(profile(volumes=[volume], allow={"namespaces": ["*"]}))
    for namespace in ("team-a", "team-b"):
        plan = planned(**{**JOB, "metadata.namespace": namespace})
        pod = backed.render(plan, Attempt(1)).objects[-1]["spec"]["template"]["spec"]
        mounts = pod["containers"][0]["volumeMounts"]
        assert [one.get("subPath") for one in mounts if one["mountPath"] == "/vol"] == [
            f"a/{namespace}/b"
        ]


@pytest.mark.parametrize("folder", ["../x", "/abs", "{name}", "a/../b", ".x", "a//b", "x/", "{"])
def test_a_sub_path_that_leaves_the_volume_or_has_another_placeholder_is_refused(
    folder: str, tmp_path: Path
) -> None:
    spoilt = profile_manifest()
    volume = {"name": "v", "mountPath": "/v", "source": {"emptyDir": {}}, "subPath": folder}
    spoilt["spec"]["volumes"] = [volume]
    out = CliRunner().invoke(app, ["validate", files(tmp_path, spoilt, manifest(**JOB))])
    assert out.exit_code == 1
    assert "spec.volumes[0].subPath" in out.stdout
    assert "must be a relative path of names" in " ".join(out.stdout.split())


def tracker(**fields: Any) -> dict[str, Any]:
    """Return the additions of a job with one tracker."""
    return {"observability": {"trackers": [{"type": "mlflow", "project": "p", **fields}]}}


REFUSED: list[tuple[Mapping[str, Any], str, str]] = [
    ({"metadata.namespace": "other"}, "spec.backend.kubernetes.profile",
     "may not be used in namespace"),
    ({"topology__nodes": 8, "training__globalBatchSize": 8}, "spec.topology.nodes",
     "8 is more than the 4 that profile default allows; use at most 4"),
    ({"topology": {"gpusPerNode": 4, "processesPerNode": None}}, "spec.topology.gpusPerNode",
     "4 is more than the 2"),
    ({"topology__instanceType": "big"}, "spec.topology.instanceType",
     "big is not offered by profile default; use small or medium"),
    ({"topology__rdma": "required"}, "spec.topology.rdma", "has no InfiniBand; use auto"),
    ({"backend__kubernetes__serviceAccountName": "root"},
     "spec.backend.kubernetes.serviceAccountName",
     "root is a service account that the profile does not allow (allowed: train-*)"),
    ({"backend__kubernetes__image": "evil:1"}, "spec.backend.kubernetes.image",
     "evil:1 is an image"),
    ({"model__tokenSecretRef": {"name": "db", "key": "k"}}, "spec.model.tokenSecretRef.name",
     "db is a secret that the profile does not allow (allowed: hub)"),
    ({"output__uri": "pvc://private/x"}, "spec.output.uri", "private is a claim"),
    ({"dataset__source": "pvc://data/../../etc"}, "spec.dataset.source", "leads out of the claim"),
    ({"dataset__source": "file://./x"}, "spec.dataset.source",
     "cannot be used by the kubernetes backend; use pvc://CLAIM/PATH or hf://ORG/NAME"),
    ({"dataset__source": "hf:///mnt/private/x.jsonl"}, "spec.dataset.source",
     "is not a repository of the hub; write hf://ORG/NAME"),
    ({"model__source": "hf://../cache/model"}, "spec.model.source", "is not a repository"),
    ({"checkpoint__uri": "hf://a/b"}, "spec.checkpoint.uri", "use pvc://CLAIM/PATH"),
    ({"checkpoint__resumeFrom": "pvc://private/x"}, "spec.checkpoint.resumeFrom",
     "private is a claim"),
    ({"method": {"lora": {"startFrom": "pvc://private/x"}}}, "spec.method.lora.startFrom",
     "private is a claim"),
    ({"dataset": {"also": [{"source": "pvc://private/x"}]}}, "spec.dataset.also[0].source",
     "private is a claim"),
    ({"method": {"lora": {"startFrom": "hf://me/adapter"}}}, "spec.method.lora.startFrom",
     "use pvc://CLAIM/PATH"),
    ({"dataset": {"also": [{"source": "azureml://a/b"}]}}, "spec.dataset.also[0].source",
     "cannot be used by the kubernetes backend"),
    ({"model__source": "azureml://models/m"}, "spec.model.source",
     "use pvc://CLAIM/PATH or hf://ORG/NAME"),
    ({"output__uri": "hf://me/model"}, "spec.output.uri", "use pvc://CLAIM/PATH"),
    ({"dataset": {"evalSource": "pvc://private/x"}}, "spec.dataset.evalSource",
     "private is a claim"),
    ({"queue": {"name": "team", "priorityClass": "first"}}, "spec.queue.priorityClass",
     "first is a priority class that the profile does not allow; name another"),
    ({"queue": {"name": "team a"}}, "spec.queue.name", '"team a" cannot be the value of a label'),
    ({"queue": {"name": "team", "priorityClass": "p" * 64}}, "spec.queue.priorityClass",
     "use at most 63 letters"),
    ({"topology__instanceType": "Standard_D4s_v5\n"}, "spec.topology.instanceType",
     "cannot be the value of a label"),
    ({"backend__kubernetes__serviceAccountName": "train-A"},
     "spec.backend.kubernetes.serviceAccountName",
     "train-A is not a valid object name; use lower-case letters"),
    ({"model__tokenSecretRef": {"name": "../hub", "key": "k"}}, "spec.model.tokenSecretRef.name",
     "../hub is not a valid object name"),
    ({"topology__nodes": 2, "observability__metricsPort": 29500},
     "spec.observability.metricsPort", "is the rendezvous port of several nodes"),
    ({"output__uri": None}, "spec.output.uri", "is missing"),
    ({"checkpoint__uri": None, "topology__nodes": 2}, "spec.checkpoint.uri", "is missing"),
    ({"backend__kubernetes__profile": "nope"}, "spec.backend.kubernetes.profile",
     "nope is looked up"),
    (tracker(type="wandb"), "spec.observability.trackers[0].url",
     "https://api.wandb.ai is a tracking server that the profile does not allow (allowed: "
     "https://mlflow.test)"),
    (tracker(url="https://mlflow.test.evil.test"), "spec.observability.trackers[0].url",
     "https://mlflow.test.evil.test is a tracking server that the profile does not allow"),
    (tracker(url="https://mlflow.test/a"), "spec.observability.trackers[0].url",
     "is a tracking server that the profile does not allow"),
    (tracker(), "spec.observability.trackers[0].url",
     "is missing; set the address of the MLflow server"),
    (tracker(url="https://mlflow.test", secretRef={"name": "db", "key": "k"}),
     "spec.observability.trackers[0].secretRef.name",
     "db is a secret that the profile does not allow (allowed: hub)"),
    (tracker(url="https://mlflow.test", secretRef={"name": "../hub", "key": "k"}),
     "spec.observability.trackers[0].secretRef.name", "../hub is not a valid object name"),
]  # fmt: skip


def limited() -> KubernetesBackend:
    return backend(
        profile(
            allow={
                "namespaces": ["default", "team-*"],
                "maxGpusPerNode": 2,
                "secrets": ["hub"],
                "trackers": ["https://mlflow.test"],
                "serviceAccounts": ["train-*"],
                "env": ["OF_*", "HF_*", "LD_*", "NVIDIA_*", "PYTHON*"],
                "maxResources": {"memory": "8Gi", "cpu": "64"},
            },
            nodes={"instanceTypes": ["small", "medium"]},
            resources={"cpu": "4"},
            env={"OF_PROFILE": "1"},
        )
    )


@pytest.mark.parametrize(("overrides", "path", "says"), REFUSED)
def test_a_job_gets_nothing_that_its_profile_does_not_allow(
    overrides: dict[str, Any], path: str, says: str
) -> None:
    (found,) = limited().validate(job(**{**JOB, **overrides}))
    assert found.path == path
    assert says in found.message


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("/scratch/state", True),
        ("/extra/disk", True),
        ("/mnt/out/state", True),
        ("/fast/state", True),
        ("/scratch/../fast/state", True),
        ("/shared/state", False),
        ("/frozen/state", False),
        ("/scratch/../frozen/state", False),
        ("/mnt/other/state", False),
        ("/fast-too", False),
        ("/", False),
    ],
)
def test_optimizer_state_is_on_no_volume_that_the_job_may_not_write_to(
    path: str, is_allowed: bool
) -> None:
    names = ("fast", "shared", "frozen")
    volumes = [
        {"name": name, "mountPath": f"/{name}", "readOnly": name == "frozen",
         "source": {"persistentVolumeClaim": {"claimName": name}}}
        for name in names
    ]  # fmt: skip
    allow = {"namespaces": ["*"], "claims": ["*"], "volumes": ["fast", "frozen"]}
    strategy = {"type": "zero3", "offload": "nvme", "nvmePath": path}
    checked = job(
        **{
            **JOB,
            "strategy": strategy,
            "output__uri": "pvc://out/x",
            "checkpoint__uri": "pvc://out/c",
        }
    )
    found = backend(profile(allow=allow, volumes=volumes)).validate(checked)
    assert [one.path for one in found] == ([] if is_allowed else ["spec.strategy.nvmePath"])
    if found:
        assert "use /scratch/NAME or /extra/NAME or /mnt/out/NAME or /fast/NAME" in found[0].message


@pytest.mark.parametrize(
    ("more", "is_read_only"),
    [
        ({}, True),
        ({"allow": {"namespaces": ["*"], "claims": ["*"], "volumes": ["st*"]}}, False),
        ({"cacheDirectory": "/store/cache"}, False),
        ({"cacheDirectory": "/store-of-another/cache"}, True),
        ({"env": {"TRITON_CACHE_DIR": "/store/triton"}}, False),
    ],
)
def test_a_volume_that_no_job_may_name_is_writable_for_caches_only(
    more: dict[str, Any], is_read_only: bool
) -> None:
    volume = {
        "name": "store",
        "mountPath": "/store",
        "source": {"nfs": {"server": "s", "path": "/"}},
    }
    used = profile(**{"allow": {"namespaces": ["*"], "claims": ["*"]}, "volumes": [volume], **more})
    batch_job = backend(used).render(planned(**JOB), Attempt(1)).objects[-1]
    pod = batch_job["spec"]["template"]["spec"]
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "profile-store")
    assert mount["readOnly"] is is_read_only


def test_a_namespace_that_may_not_use_a_profile_sees_no_value_of_it() -> None:
    asked = {"topology__nodes": 8, "training__globalBatchSize": 8, "output__uri": "pvc://other/x"}
    asked |= {"backend__kubernetes__serviceAccountName": "root", "topology__instanceType": "big"}
    (found,) = limited().validate(job(**{**JOB, **asked, "metadata.namespace": "other"}))
    assert str(found) == (
        "spec.backend.kubernetes.profile default may not be used in namespace other; name another "
        "profile, or have the namespace added to its allow.namespaces"
    )


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [
        ("labels", "a/b/c", "x", 'cannot be a key, because "a/b" before the / is not a DNS name'),
        ("labels", "a", "x y", '"x y" cannot be the value of a label'),
        ("annotations", "A B", "x", "cannot be a key; use at most 63 letters"),
    ],
)
def test_pods_get_no_labels_and_annotations_that_the_api_server_refuses(
    kind: str, key: str, value: str, says: str
) -> None:
    open_to_all = backend(profile(allow={"namespaces": ["*"], "metadata": ["*"]}))
    wanted = {kind: {key: value}}

    (found,) = open_to_all.validate(job(**{**JOB, "podTemplate": {"metadata": wanted}}))

    assert found.path == show_path(("spec", "podTemplate", "metadata", kind, key))
    assert says in found.message


ALLOWED: list[Mapping[str, Any]] = [
    {"metadata.namespace": "team-a"},
    {"topology": {"gpusPerNode": 2, "processesPerNode": None, "instanceType": "small"}},
    {"model__tokenSecretRef": {"name": "hub", "key": "k"}},
    {"backend__kubernetes__serviceAccountName": "train-a"},
    {"backend__kubernetes__image": "registry.test/trainer:1"},
    {"queue": {"name": "team"}},
    {"observability__metricsPort": 29500},
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_job_gets_what_its_profile_allows(overrides: Mapping[str, Any]) -> None:
    assert limited().validate(job(**{**JOB, **overrides})) == []


def test_what_its_profile_does_not_allow_is_not_rendered_either() -> None:
    """A job may be another by now than the one that was checked when its attempt was opened."""
    with pytest.raises(BackendError, match=r"spec\.backend\.kubernetes\.image evil:1 is an image"):
        limited().render(planned(**{**JOB, "backend__kubernetes__image": "evil:1"}), Attempt(1))


def container(**changes: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", **changes}]}


def mounted(**mount: Any) -> dict[str, Any]:
    """Return a template with a volume `v` and one mount."""
    volumes = [{"name": "v", "emptyDir": {}}]
    return {"volumes": volumes, **container(volumeMounts=[{"name": "v", **mount}])}


def asked(**amounts: Any) -> dict[str, Any]:
    return container(resources={"requests": amounts})


def secret(name: str) -> dict[str, Any]:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}


TEMPLATES: list[tuple[dict[str, Any], str]] = [
    ({"hostNetwork": True}, "hostNetwork"),
    ({"serviceAccountName": "x"}, "serviceAccountName"),
    ({"securityContext": {"runAsUser": 0}}, "securityContext"),
    ({"initContainers": []}, "initContainers"),
    ({"nodeSelector": {"a": "b"}}, "nodeSelector"),
    ({"tolerations": []}, "tolerations"),
    ({"imagePullSecrets": [{"name": "db"}]}, "imagePullSecrets[0].name"),
    ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volumes[0].hostPath"),
    ({"volumes": [{"name": "v", "secret": {"secretName": "db"}}]}, "volumes[0].secret"),
    ({"volumes": [{"name": "v", "configMap": {"name": "c"}}]}, "volumes[0].configMap"),
    ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "private"}}]},
     "volumes[0].persistentVolumeClaim.claimName"),
    ({"volumes": [{"name": "scratch", "emptyDir": {}}]}, "volumes[0].name"),
    ({"volumes": [{"name": "claim-0", "emptyDir": {}}]}, "volumes[0].name"),
    ({"volumes": [{"name": "v"}]}, "volumes[0]"),
    ({"volumes": {"name": "v"}}, "volumes"),
    ({"volumes": [{"name": "v", "persistentVolumeClaim": "private"}]},
     "volumes[0].persistentVolumeClaim"),
    ({"containers": [{"name": "sidecar"}]}, "containers[0].name"),
    ({"containers": [{"name": "trainer"}, {"name": "trainer"}]}, "containers[1].name"),
    ({"containers": {"name": "trainer", "image": "evil"}}, "containers"),
    (container(image="evil"), "containers[0].image"),
    (container(command=["sh"]), "containers[0].command"),
    (container(securityContext={}), "containers[0].securityContext"),
    (container(envFrom=[]), "containers[0].envFrom"),
    (container(env=[{"name": "FINETUNE_X", "value": "1"}]), "containers[0].env[0].name"),
    (container(env=[{"name": "RANK", "value": "1"}]), "containers[0].env[0].name"),
    (container(env=[{"name": "PYTHONPATH", "value": "/x"}]), "containers[0].env[0].name"),
    (container(env=[{"name": "HF_ENDPOINT", "value": "https://x"}]), "containers[0].env[0].name"),
    (container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
     "containers[0].env[0].name"),
    (container(env=[{"name": "OF_PROFILE", "value": "1"}]), "containers[0].env[0].name"),
    (container(env=[{"name": "HTTPS_PROXY", "value": "x"}]), "containers[0].env[0].name"),
    (container(env=[{"name": "OF_JOB", "value": 1}]), "containers[0].env[0].value"),
    (container(env=[{"name": "OF_JOB", **secret("db")}]),
     "containers[0].env[0].valueFrom.secretKeyRef.name"),
    (container(env=[{"name": "OF_JOB", "valueFrom": {**secret("hub")["valueFrom"],
                                                     "fieldRef": {}}}]),
     "containers[0].env[0].valueFrom.fieldRef"),
    (mounted(name="profile-models", mountPath="/extra/x"), "containers[0].volumeMounts[0].name"),
    (mounted(name="claim-0", mountPath="/extra/x"), "containers[0].volumeMounts[0].name"),
    (mounted(mountPath="/mnt/x"), "containers[0].volumeMounts[0].mountPath"),
    (mounted(mountPath="//mnt/x"), "containers[0].volumeMounts[0].mountPath"),
    (mounted(mountPath="/usr/lib/python3"), "containers[0].volumeMounts[0].mountPath"),
    (mounted(mountPath="/extra/../usr"), "containers[0].volumeMounts[0].mountPath"),
    (mounted(mountPath="/extra"), "containers[0].volumeMounts[0].mountPath"),
    (mounted(mountPath="/extra/x", mountPropagation="Bidirectional"),
     "containers[0].volumeMounts[0].mountPropagation"),
    (asked(memory="9Gi"), "containers[0].resources.requests.memory"),
    (asked(memory="1e12"), "containers[0].resources.requests.memory"),
    (asked(cpu="1"), "containers[0].resources.requests.cpu"),
    (asked(**{"ephemeral-storage": "1Gi"}),
     'containers[0].resources.requests["ephemeral-storage"]'),
    (container(resources={"claims": [{"name": "x"}]}), "containers[0].resources.claims"),
    (container(resources={"limits": {"nvidia.com/gpu": "9"}}),
     'containers[0].resources.limits["nvidia.com/gpu"]'),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "path"), TEMPLATES, ids=lambda one: str(one)[:60])
def test_a_pod_template_says_only_what_is_its_own_business(spec: dict[str, Any], path: str) -> None:
    made = job(**{**JOB, "podTemplate": {"spec": spec}})
    (found,) = limited().validate(made)
    assert found.path == f"spec.podTemplate.spec.{path}"
    assert found.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"hostNetwork": True},
         "spec.podTemplate.spec.hostNetwork cannot be set by a job; remove it"),
        ({"toleration": []},
         "spec.podTemplate.spec.toleration cannot be set by a job; did you mean tolerations?"),
        ({"volumes": "v"}, 'spec.podTemplate.spec.volumes "v" must be a list'),
        (container(env=[{"name": "HTTPS_PROXY", "value": "x"}]),
         "spec.podTemplate.spec.containers[0].env[0].name HTTPS_PROXY is a variable that the "
         "profile does not allow (allowed: OF_*, HF_*, LD_*, NVIDIA_*, PYTHON*); name another"),
        (asked(memory="9Gi"),
         "spec.podTemplate.spec.containers[0].resources.requests.memory 9Gi is more than the 8Gi "
         "that the profile allows; use less"),
        (mounted(mountPath="/usr"),
         "spec.podTemplate.spec.containers[0].volumeMounts[0].mountPath /usr is not below /extra; "
         "write /extra/NAME"),
    ],
)  # fmt: skip
def test_what_a_pod_template_may_not_say_is_told_with_what_to_do(
    spec: dict[str, Any], says: str
) -> None:
    (found,) = limited().validate(job(**{**JOB, "podTemplate": {"spec": spec}}))
    assert str(found) == says


def test_a_pod_template_adds_what_the_profile_leaves_to_it() -> None:
    spec = mounted(mountPath="/extra/x", subPath="a", readOnly=True)
    (trainer,) = spec["containers"]
    trainer["env"] = [{"name": "OF_JOB", **secret("hub")}]
    trainer["resources"] = {"requests": {"memory": "8Gi"}, "limits": {"memory": "8192Mi"}}
    made = planned(**{**JOB, "podTemplate": {"spec": spec}})
    assert limited().validate(made.job) == []
    (rendered,) = (
        limited().render(made, Attempt(1)).objects[-1]["spec"]["template"]["spec"]["containers"]
    )
    assert rendered["env"][-1] == trainer["env"][0]
    assert rendered["volumeMounts"][-1] == trainer["volumeMounts"][0]
    assert rendered["resources"]["limits"] == {"memory": "8192Mi"}


def test_a_pod_template_moves_pods_only_where_nobody_else_has_said_where() -> None:
    found = backend(
        profile(
            allow={"scheduling": True},
            nodes={"agentPools": ["gpu"], "selector": {"pool": "train"}},
        )
    )
    needed: Object = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
    chosen = {"pool": "other", "disk": "x", "kubernetes.io/os": "windows"}
    spec = {"affinity": {"nodeAffinity": needed}, "nodeSelector": chosen}
    paths = [one.path for one in found.validate(job(**{**JOB, "podTemplate": {"spec": spec}}))]
    assert paths == [
        "spec.podTemplate.spec.nodeSelector.pool",
        'spec.podTemplate.spec.nodeSelector["kubernetes.io/os"]',
        "spec.podTemplate.spec.affinity.nodeAffinity",
    ]


def test_a_variable_that_is_ours_by_default_is_replaced_and_not_named_twice() -> None:
    template = {"spec": container(env=[{"name": "NCCL_SOCKET_IFNAME", "value": "ib0"}])}
    topology = {"nodes": 2, "gpusPerNode": 2, "processesPerNode": None}
    plan = planned(**{**JOB, "topology": topology, "podTemplate": template})
    made = backend(profile(allow={"env": ["NCCL_*"]})).render(plan, Attempt(1)).objects[-1]
    env = made["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["value"] for one in env if one["name"] == "NCCL_SOCKET_IFNAME"] == ["ib0"]


def test_variables_of_a_profile_replace_defaults_but_nothing_that_a_gang_or_a_job_needs() -> None:
    given = {"HF_HOME": "/hub", "NCCL_SOCKET_IFNAME": "ib0", "HF_TOKEN": "of all",
             "FINETUNE_RDZV_ENDPOINT": "elsewhere:1"}  # fmt: skip
    topology = {"nodes": 2, "gpusPerNode": 2, "processesPerNode": None}
    token = {"model__tokenSecretRef": {"name": "hub", "key": "token"}}
    plan = planned(**{**JOB, "topology": topology, **token})
    made = backend(profile(env=given, allow={"secrets": ["hub"]})).render(plan, Attempt(1))
    env = made.objects[-1]["spec"]["template"]["spec"]["containers"][0]["env"]
    named = {one["name"]: one.get("value", "a secret's") for one in env}
    assert len(named) == len(env)
    assert {name: named[name] for name in given} == {
        "HF_HOME": "/hub",
        "NCCL_SOCKET_IFNAME": "ib0",
        "HF_TOKEN": "a secret's",
        "FINETUNE_RDZV_ENDPOINT": "tiny-1-0.tiny-finetune.default.svc:29500",
    }


@pytest.mark.parametrize(
    ("cpu", "asks", "threads"),
    [("4", None, 2), ("4500m", None, 2), ("1k", None, 500), (None, "8", 4), (None, None, 1)],
)
def test_ranks_share_the_cores_that_their_pod_asks_for(
    cpu: str | None, asks: str | None, threads: int
) -> None:
    template = {"spec": asked(cpu=asks)} if asks else None
    plan = planned(**{**JOB, "topology__processesPerNode": 2, "podTemplate": template})
    allowing = profile(resources={"cpu": cpu}, allow={"maxResources": {"cpu": "16"}})
    made = backend(allowing).render(plan, Attempt(1)).objects[-1]["spec"]["template"]
    text = made["metadata"]["annotations"]["finetune.dev/config"]
    assert TrainConfig.model_validate_json(text).world.threads_per_process == threads


def test_amounts_are_compared_as_kubernetes_does() -> None:
    rising = [
        "1m",
        ".5",
        "1",
        "1k",
        "1Ki",
        "1M",
        "1Mi",
        "1G",
        "1.5G",
        "2Gi",
        "1T",
        "1Ti",
        "1P",
        "1E",
    ]
    amounts = [amount(text) for text in rising]
    assert amounts == sorted(set(amounts))
    assert [amount(text) for text in ("500m", "16Gi", 2)] == [Decimal("0.5"), 16 * 2**30, 2]
    for text in ("", "1K", "1e3", "-1", "1 Gi", "Gi"):
        with pytest.raises(
            ValueError, match="is not a valid amount; write for example 8, 500m or 16Gi"
        ):
            amount(text)


def probe(hang_seconds: int) -> Any:
    """Return the liveness probe of a job whose checkpoints are in `/mnt/a/b`."""
    limits = {"hangSeconds": hang_seconds}
    plan = planned(**{**JOB, "deadlines": limits, "checkpoint__uri": "pvc://a/b"})
    made = backend(profile(allow={"claims": ["*"]})).render(plan, Attempt(1)).objects[-1]
    return made["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]


@pytest.mark.parametrize("hang_seconds", [1, 60, 600, 7200])
def test_a_probe_bears_with_storage_that_stands_still_as_long_as_the_watchdog_does(
    hang_seconds: int,
) -> None:
    asks = probe(hang_seconds)
    assert asks["periodSeconds"] * asks["failureThreshold"] >= max(60, hang_seconds)
    assert asks["initialDelaySeconds"] >= max(60, hang_seconds)


def test_a_run_without_a_limit_for_hangs_is_ended_by_no_probe() -> None:
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & set(
        pod_of("rdma-packed")["spec"]["containers"][0]
    )


def heartbeat(folder: Path) -> list[str]:
    """Return the command of the probe, asking in another folder."""
    command: list[str] = probe(60)["exec"]["command"]
    assert command.count("/mnt/a/b/run") == 1
    return [str(folder) if part == "/mnt/a/b/run" else part for part in command]


@pytest.mark.parametrize(
    ("index", "age_seconds", "is_alive"),
    [("0", 0, True), ("0", 600, False), ("0", None, False), ("1", 600, True)],
)
def test_a_pod_lives_as_long_as_its_rank_zero_reports_steps(
    tmp_path: Path, index: str, age_seconds: int | None, is_alive: bool
) -> None:
    folder = tmp_path / "a $(touch injected) folder"
    folder.mkdir()
    if age_seconds is not None:
        file = folder / "progress.json"
        file.touch()
        at = file.stat().st_mtime - age_seconds
        os.utime(file, (at, at))
    environ = {**os.environ, "JOB_COMPLETION_INDEX": index}
    done = subprocess.run(heartbeat(folder), env=environ, cwd=tmp_path, check=False)
    assert (done.returncode == 0) == is_alive
    assert [one.name for one in tmp_path.iterdir()] == [folder.name], "the path was run"


@pytest.mark.parametrize("key", ["app", "finetune.dev/job-uid", "azure.workload.identity/use"])
@pytest.mark.parametrize("kind", ["labels", "annotations"])
def test_labels_that_others_act_on_are_not_for_everybody(kind: str, key: str) -> None:
    made = job(**{**JOB, "podTemplate": {"metadata": {kind: {key: "x"}}}})
    (found,) = backend(profile(allow={"metadata": ["team"]})).validate(made)
    assert found.path == f'spec.podTemplate.metadata.{kind}["{key}"]'


def clustered(*objects: tuple[Any, Object]) -> KubernetesBackend:
    caches = {kind: ObjectCache(kind) for kind in (FINE_TUNE_PROFILES, JOBS)}
    for kind, made in objects:
        caches[kind].put(made)
    cluster = Cluster(None, caches.__getitem__)  # type: ignore[arg-type]
    return KubernetesBackend(BackendContext(Path(), cluster=cluster))


def stored_profile(image: str, **changes: Any) -> Object:
    made = profile(image=image, **changes)
    spec = made.model_dump(by_alias=True, exclude_none=True, mode="json")
    return {"metadata": {"name": "default", "resourceVersion": "1"}, "spec": spec}


def image_of(made: KubernetesBackend, attempt: int, **overrides: Any) -> str:
    request = made.render(planned(**{**JOB, **overrides}), Attempt(attempt))
    return str(request.objects[-1]["spec"]["template"]["spec"]["containers"][0]["image"])


def test_a_later_attempt_keeps_to_the_profile_of_the_first() -> None:
    before = clustered((FINE_TUNE_PROFILES, stored_profile("old:1")))
    first = dict(before.render(planned(**JOB), Attempt(1)).objects[-1])
    first["metadata"] = {**first["metadata"], "resourceVersion": "2", "uid": "job-1"}
    after = clustered((FINE_TUNE_PROFILES, stored_profile("new:2")), (JOBS, first))
    assert image_of(after, 2) == "old:1"
    forged = {**first, "metadata": {**first["metadata"], "ownerReferences": []}}
    forging = clustered((FINE_TUNE_PROFILES, stored_profile("new:2")), (JOBS, forged))
    assert image_of(forging, 2) == "new:2"
    assert image_of(clustered((FINE_TUNE_PROFILES, stored_profile("new:2"))), 2) == "new:2"
    assert image_of(after, 1, uid="uid-of-another-job") == "new:2"


def test_what_a_profile_allows_no_more_a_later_attempt_does_not_get() -> None:
    before = clustered((FINE_TUNE_PROFILES, stored_profile("old:1")))
    first = dict(before.render(planned(**JOB), Attempt(1)).objects[-1])
    first["metadata"] = {**first["metadata"], "resourceVersion": "2", "uid": "job-1"}
    assert '"allow"' not in first["metadata"]["annotations"][PROFILE_ANNOTATION]
    narrower = stored_profile("new:2", allow={"claims": ["data", "checkpoints"]})
    after = clustered((FINE_TUNE_PROFILES, narrower), (JOBS, first))
    (found,) = after.validate(planned(**JOB).job)
    assert str(found).startswith("spec.output.uri models is a claim that the profile does not")
    gone = clustered((JOBS, first)).validate(planned(**JOB).job)
    assert [one.path for one in gone] == ["spec.backend.kubernetes.profile"]


def test_a_missing_profile_is_a_sentence_about_its_field() -> None:
    (found,) = clustered().validate(job(**JOB))
    assert str(found) == (
        "spec.backend.kubernetes.profile default does not exist; create that FineTuneProfile or "
        "name another"
    )


def test_a_mount_that_fails_is_told_from_the_newest_event_about_the_pod() -> None:
    def event(uid: str, reason: str, message: str, time: str) -> Object:
        about = {"kind": "Pod", "name": "tiny-1-0-x", "uid": uid}
        return {"metadata": {}, "involvedObject": about, "reason": reason, "message": message,
                "lastTimestamp": time}  # fmt: skip

    events = [
        event("p0", "FailedMount", "old", "2026-01-01T00:00:00Z"),
        event("p0", "FailedMount", "mount failed: permission denied", "2026-01-01T00:00:09Z"),
        event("p0", "Scheduled", "fine", "2026-01-01T00:00:10Z"),
        event("other", "FailedMount", "not ours", "2026-01-01T00:00:11Z"),
    ]
    told = from_events(events, frozenset({"p0"}))
    assert told is not None
    assert told.reason == "VolumeNotReady"
    assert told.message == "Pod tiny-1-0-x: mount failed: permission denied"


def files(folder: Path, *values: Mapping[str, Any]) -> str:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump_all(json.loads(json.dumps(values)), sort_keys=False))
    return str(file)


def profile_manifest(**changes: Any) -> dict[str, Any]:
    spec = profile(**changes).model_dump(by_alias=True, exclude_none=True, mode="json")
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile"}
    return {**head, "metadata": {"name": "default"}, "spec": spec}


def test_ftctl_uses_the_profile_beside_the_job(tmp_path: Path) -> None:
    made = manifest(**{**JOB, "backend": None})
    file = files(tmp_path, profile_manifest(), made)
    run = CliRunner().invoke
    assert run(app, ["validate", file]).stdout == "1 FineTuneJob checked, no problem\n"
    rendered = run(app, ["render", file, "--backend", "kubernetes"]).stdout
    documents = list(yaml.safe_load_all(rendered))
    assert [one["kind"] for one in documents] == ["NetworkPolicy", "Job"]
    forbidding = files(tmp_path, profile_manifest(allow={"claims": []}), made)
    refused = run(app, ["validate", forbidding])
    assert refused.exit_code == 1
    assert "spec.output.uri models is a claim that the profile does not allow" in refused.stdout


def test_ftctl_says_what_it_cannot_know_without_the_profile(tmp_path: Path) -> None:
    file = files(tmp_path, manifest(**JOB))
    validated = CliRunner().invoke(app, ["validate", file])
    assert validated.exit_code == 0
    assert "note: " in validated.stdout
    assert "default is looked up in the cluster" in validated.stdout
    rendered = CliRunner().invoke(app, ["render", file])
    assert rendered.exit_code == 1
    other = tmp_path / "profile.yaml"
    other.write_text(yaml.safe_dump(profile_manifest()))
    assert CliRunner().invoke(app, ["render", file, "--profile", str(other)]).exit_code == 0


def test_a_profile_with_a_slip_is_refused_with_its_line(tmp_path: Path) -> None:
    made = profile_manifest()
    made["spec"]["volumes"] = [{"name": "v", "mountPath": "cache", "source": {"emptyDir": {}}}]
    file = files(tmp_path, made, manifest(**JOB))
    out = CliRunner().invoke(app, ["validate", file])
    assert out.exit_code == 1
    assert "spec.volumes[0].mountPath" in out.stdout
    assert "must be an absolute path; start it with /" in out.stdout


@pytest.mark.parametrize("source", ["own", "dcgm", "none"])
def test_where_metrics_of_gpus_come_from_reaches_the_trainer(source: str) -> None:
    made = Case(profile={"gpuMetrics": source}).text().replace("\n", "")
    assert f'"gpuMetrics":"{source}"' in made


def test_the_lag_of_the_storage_reaches_the_trainer() -> None:
    case = Case(profile={"listingLagSeconds": 2.5}, job={"take_over": True})
    assert '"takeOver":true,"listingLagSeconds":2.5' in case.text().replace("\n", "")
