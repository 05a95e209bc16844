"""Jobs of a real cluster: applied with kubectl, looked at through the API."""

from typing import Any

from finetune_operator.kube.resources import EVENTS, Object
from support.cluster.operators import Api, condition, wait_until
from support.cluster.real_cluster import Given, RealCluster
from support.cluster.real_volume import CLAIM, Volume

NAMESPACE = "finetune-e2e"
ROWS = {"format": "instruction", "columns": {"instruction": "prompt", "output": "completion"}}


class Jobs:
    """The jobs of this session: applied with kubectl, looked at through the API."""

    def __init__(self, cluster: RealCluster, api: Api, volume: Volume) -> None:
        self.cluster = cluster
        self.api = api
        self.volume = volume

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the jobs' namespace."""
        return self.cluster.kubectl("--namespace", NAMESPACE, *arguments)

    def apply(self, name: str, profile: str = "default", **spec: Any) -> None:
        """Apply a job that trains an adapter of the tiny model on two nodes, changed in `spec`."""
        made = {
            "model": {"source": f"pvc://{CLAIM}/model", "baseName": "tests/tiny"},
            "dataset": {"source": f"pvc://{CLAIM}/train.jsonl"} | ROWS,
            "method": {"type": "lora", "lora": {"r": 4, "alpha": 8}},
            "training": {"globalBatchSize": 4, "maxSeqLength": 64, "learningRate": 1e-3}
            | spec.pop("training", {"maxSteps": 1_000_000}),
            "topology": {"nodes": 2, "gpusPerNode": 0},
            "checkpoint": {"uri": f"pvc://{CLAIM}/checkpoints/{name}", "everySteps": 10},
            "output": {"uri": f"pvc://{CLAIM}/output/{name}"},
            "observability": {"statusIntervalSeconds": 5},
            "backend": {"type": "kubernetes", "kubernetes": {"profile": profile}},
        }
        metadata = {"name": name, "namespace": NAMESPACE}
        head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob"}
        self.cluster.apply({**head, "metadata": metadata, "spec": {**made, **spec}})

    def get(self, name: str) -> Object:
        """Return the job."""
        made = self.api.job(NAMESPACE, name)
        assert made is not None, f"{name} is gone"
        return made

    def wait(self, name: str, kind: str, seconds: float = 400) -> Object:
        """Wait for a condition to be True; return the job.

        Raises:
            AssertionError: it was not in time, or the job ended otherwise.
        """

        def look() -> Object | None:
            made = self.get(name)
            if condition(made, kind)["status"] == "True":
                return made
            assert not is_over(made), self.kubectl("describe", f"finetunejob/{name}")
            return None

        return wait_until(look, seconds, f"{name} to be {kind}")

    def wait_for_checkpoint(self, name: str) -> None:
        """Return as soon as the volume holds a committed checkpoint of a job that goes on."""
        pattern = f"checkpoints/{name}/step-*/manifest.json"
        wait_until(lambda: self.volume.has(pattern) or is_over(self.get(name)), 400)
        assert not is_over(self.get(name)), self.kubectl("describe", f"finetunejob/{name}")

    def wait_for_reason(self, name: str, kind: str, reason: str, seconds: float) -> Object:
        """Return the condition as soon as it gives that reason."""

        def look() -> Object | None:
            found = condition(self.get(name), kind)
            return found if found.get("reason") == reason else None

        return wait_until(look, seconds, f"{kind} {reason} of {name}")

    def wait_for_warning_about_a_pod(self, name: str) -> None:
        """Return as soon as an Event of the cluster tells of trouble with a pod of the job."""

        def look() -> bool:
            listed = self.api.run(self.api.client.list(EVENTS, NAMESPACE)).items
            about = [one["involvedObject"]["name"] for one in listed if one["type"] == "Warning"]
            return any(one.startswith(f"{name}-1-") for one in about)

        wait_until(look, 120, f"a warning about a pod of {name}")

    def children(self, name: str) -> list[Object]:
        """Return everything that belongs to a job, pods included."""
        return self.everything("--selector", f"finetune.dev/job={name}")

    def everything(self, *selector: str) -> list[Object]:
        """Return what is in the jobs' namespace of the kinds that a job may leave behind."""
        kinds = "jobs,pods,services,endpointslices,networkpolicies,configmaps,secrets"
        return self.cluster.list(kinds, *selector, "--namespace", NAMESPACE)

    def pods(self, name: str, attempt: int) -> list[Object]:
        """Return the pods of an attempt, rank 0's first."""
        own = f"finetune.dev/job={name},finetune.dev/attempt={attempt}"
        found = self.cluster.list("pods", "--selector", own, "--namespace", NAMESPACE)
        return sorted(found, key=lambda one: str(one["metadata"]["name"]))

    def events(self, name: str) -> list[str]:
        """Return the reasons of the job's Events, as they came about."""
        about = f"involvedObject.name={name},involvedObject.kind=FineTuneJob"
        found = self.cluster.list("events", "--field-selector", about, "--namespace", NAMESPACE)
        in_order = sorted(found, key=lambda one: int(one["metadata"]["resourceVersion"]))
        return [one["reason"] for one in in_order]

    def wait_for_event(self, name: str, reason: str) -> None:
        """Return as soon as the job has such an Event; it follows the status that it tells of."""
        wait_until(lambda: reason in self.events(name), 20, f"Event {reason} of {name}")

    def delete(self, name: str) -> None:
        """Delete the job and wait until nothing of it is there."""
        self.kubectl("delete", "finetunejob", name, "--ignore-not-found")
        wait_until(lambda: not self.children(name), 60, f"{name} to leave nothing behind")


def is_over(made: Object) -> bool:
    """Say whether a job is Complete or Failed."""
    return any(condition(made, one)["status"] == "True" for one in ("Complete", "Failed"))


def profile(given: Given, name: str = "default", **changes: Any) -> Object:
    """Return the FineTuneProfile of the jobs."""
    spec: Object = {
        "image": given.trainer_image,
        "resources": {"cpu": "250m"},
        "allow": {"namespaces": [NAMESPACE], "claims": [CLAIM], "maxNodes": 2},
        **changes,
    }
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile"}
    return {**head, "metadata": {"name": name}, "spec": spec}
