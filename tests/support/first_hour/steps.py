"""Steps of the first hour on Azure, which create the resources; `STEPS` has their order.

Each step can be repeated after a failure. A step raises `StepError`, whose message goes into the
table.
"""

import json
import re
import time
from collections.abc import Callable
from typing import Any

from support.first_hour.objects import (
    CLAIM,
    PROFILE,
    attempts_in,
    copy_objects,
    has_checkpoint,
    is_complete,
    job_object,
    namespace_object,
    namespace_of,
)
from support.first_hour.shell import (
    NUM_GPU_NODES,
    NUM_SPOT_NODES,
    NUM_SYSTEM_NODES,
    STORAGE,
    TAG,
    Object,
    Options,
    Shell,
    SkippedError,
    State,
    StepError,
)

CHART = "charts/finetune-operator"
DEVICE_PLUGIN = "https://nvidia.github.io/k8s-device-plugin"
JOB_SECONDS = 3600.0
"""Limit of a wait for a job. Azure states no upper limit for a simulated eviction."""

ROLE_SECONDS = 600.0
"""Limit of the time until a role assignment has an effect."""


class Hour:
    """The steps, in the order of `STEPS`; each returns its finding for the table."""

    def __init__(self, shell: Shell, options: Options, state: State) -> None:
        self._shell, self._options, self._state = shell, options, state
        self._group = ("--resource-group", options.name)
        self._aks = (*self._group, "--cluster-name", options.name)
        self.job = ("", "")
        """Namespace and name of the newest job, for a support bundle."""

    def cluster(self) -> str:
        """Create the resource group and the cluster."""
        shell, options = self._shell, self._options
        place = ("--name", options.name, "--location", options.location)
        shell.az("group", "create", *place, "--tags", f"{TAG}={self._state.id}")
        if not shell.az("aks", "list", *self._group):
            shell.az(
                *("aks", "create", *self._group, *place, "--generate-ssh-keys"),
                *("--node-count", str(NUM_SYSTEM_NODES), "--node-vm-size", options.cpu_size),
                *("--enable-oidc-issuer", "--enable-workload-identity", "--enable-blob-driver"),
                *("--network-plugin", "azure", "--network-plugin-mode", "overlay"),
                *("--network-dataplane", "cilium"),
                *(("--attach-acr", options.acr) if options.acr else ()),
            )
        file = ("--file", str(shell.kubeconfig), "--overwrite-existing")
        shell.run("az", "aks", "get-credentials", *self._group, "--name", options.name, *file)
        shell.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=10m")
        server = json.loads(shell.kubectl("version", "--output=json"))["serverVersion"]
        return f"Kubernetes {server['gitVersion']}"

    def e2e(self) -> str:
        """Run `make e2e`, which needs a cluster without FineTuneJobs and leaves none."""
        images = self._options.images
        output = self._shell.run(
            *("make", "e2e"),
            FINETUNE_E2E_KUBECONFIG=str(self._shell.kubeconfig),
            FINETUNE_E2E_OPERATOR_IMAGE=images["operator"],
            FINETUNE_E2E_TRAINER_IMAGE=images["trainer"],
            FINETUNE_E2E_STORAGE_CLASS=STORAGE["files"],
        )
        found = re.findall(r"^=*\s*(\d+ passed.*?)\s*=*$", output, re.MULTILINE)
        if not found:
            raise StepError("make e2e printed no summary of passed tests")
        return str(found[-1])

    def operator(self) -> str:
        """Install the chart, the profile and the inputs of the jobs, and check the cluster."""
        image = self._options.images["operator"].rpartition(":")[0]
        self._helm(f"image.repository={image}", f"image.tag={self._options.version}")
        self._shell.run("make", "quickstart-assets")
        spec = {
            "image": self._options.images["trainer"],
            "resources": {"cpu": "500m", "memory": "3Gi"},
            "allow": {
                "namespaces": list(map(namespace_of, STORAGE)),
                "claims": [CLAIM],
                "maxNodes": 2,
            },
        }
        head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile"}
        self._shell.apply({**head, "metadata": {"name": PROFILE}, "spec": spec})
        namespace = namespace_of("files")
        self._shell.apply(namespace_object(namespace))
        self._shell.run("ftctl", "doctor", "--cluster", "-n", namespace)
        return "ftctl doctor --cluster finds no fault"

    def files(self) -> str:
        """Run jobs on Azure Files."""
        return self._storage("files")

    def blobfuse(self) -> str:
        """Run jobs on BlobFuse."""
        return self._storage("blobfuse")

    def gpu(self) -> str:
        """Run a job on a node with a GPU."""
        shell = self._shell
        # The device plugin selects nodes by this label.
        options = ("--node-taints", "sku=gpu:NoSchedule", "--labels", "nvidia.com/gpu.present=true")
        self._add_pool("gpu", self._options.gpu_size, NUM_GPU_NODES, *options)
        taint = [{"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}]
        shell.run(
            *("helm", "upgrade", "--install", "nvdp", "nvidia-device-plugin"),
            *("--repo", DEVICE_PLUGIN, "--namespace", "nvidia-device-plugin", "--create-namespace"),
            *("--wait", "--set-json", f"tolerations={json.dumps(taint)}"),
        )
        nodes = ("node", "--selector", "kubernetes.azure.com/agentpool=gpu")
        ready = r"--for=jsonpath={.status.allocatable.nvidia\.com/gpu}=1"
        shell.kubectl("wait", *nodes, ready, "--timeout=15m")
        found = self._complete("files", "gpu", topology={"nodes": 1, "gpusPerNode": 1})
        self._shell.az("aks", "nodepool", "delete", *self._aks, "--name", "gpu")
        return found

    def spot(self) -> str:
        """Evict a spot node, and wait until the job trains again."""
        spot = ("--priority", "Spot", "--eviction-policy", "Delete", "--spot-max-price", "-1")
        scale = ("--enable-cluster-autoscaler", "--min-count", "1")
        most = ("--max-count", str(NUM_SPOT_NODES + 1))
        self._add_pool("spot", self._options.cpu_size, NUM_SPOT_NODES, *spot, *scale, *most)
        found, counted = self._recovered("files", "spot", self._evict, capacity="spot")
        if counted:
            raise StepError(f"the eviction counted as a restart: {found}")
        self._shell.az("aks", "nodepool", "delete", *self._aks, "--name", "spot")
        return found

    def identity(self) -> str:
        """Let the operator's pod log in to Azure ML by workload identity; it only reads."""
        file = self._options.azureml_profile
        if file is None:
            raise SkippedError("no --azureml-profile")
        shell, options = self._shell, self._options
        shell.az("identity", "create", *self._group, "--name", options.name)
        identity = shell.az("identity", "show", *self._group, "--name", options.name)
        cluster = shell.az("aks", "show", *self._group, "--name", options.name)
        shell.az(
            *("identity", "federated-credential", "create", *self._group, "--name", "operator"),
            *("--identity-name", options.name, "--audiences", "api://AzureADTokenExchange"),
            *("--issuer", cluster["oidcIssuerProfile"]["issuerUrl"]),
            *("--subject", "system:serviceaccount:finetune-operator:finetune-operator"),
        )
        role = shell.az(
            *("role", "assignment", "create", "--role", "AzureML Data Scientist"),
            *("--assignee-object-id", identity["principalId"]),
            *("--assignee-principal-type", "ServicePrincipal"),
            *("--scope", workspace_in(file.read_text())),
        )
        if role["id"] not in self._state.roles:
            self._state.roles.append(role["id"])
            self._state.save()
        self._helm(f"azure.clientId={identity['clientId']}")
        # The identity of the profile would take precedence over the identity of the pod.
        text = re.sub(r"^\s*clientId:.*\n", "", file.read_text(), flags=re.MULTILINE)
        pod = ("--namespace", "finetune-operator", "-i", "deployment/finetune-operator")
        command = ("ftctl", "doctor", "--azureml", "--profile", "/dev/stdin")

        def ask() -> str | None:
            try:
                return shell.kubectl("exec", *pod, "--", *command, stdin=text)
            except StepError as error:
                self._last = str(error)
                return None

        self._last = ""
        self._wait(ask, ROLE_SECONDS, lambda: f"the operator's pod reads Azure ML ({self._last})")
        return "ftctl doctor --azureml passes in the operator's pod"

    def azureml(self) -> str:
        """Run tests/live on the workspace."""
        file = self._options.azureml_profile
        if file is None:
            raise SkippedError("no --azureml-profile")
        facts = self._options.folder / "azureml.json"
        self._shell.run(
            *("python", "-m", "pytest", "tests/live/test_azureml_live.py"),
            FINETUNE_LIVE_AZUREML_PROFILE=str(file.resolve()),
            FINETUNE_LIVE_AZUREML_FACTS=str(facts.resolve()),
        )
        return f"facts in {facts.name}, to send as well"

    def _add_pool(self, name: str, size: str, count: int, *more: str) -> None:
        listed = self._shell.az("aks", "nodepool", "list", *self._aks)
        if name not in [one["name"] for one in listed]:
            nodes = ("--name", name, "--node-vm-size", size, "--node-count", str(count))
            self._shell.az("aks", "nodepool", "add", *self._aks, *nodes, *more)

    def _helm(self, *values: str) -> None:
        place = ("--namespace", "finetune-operator", "--create-namespace")
        sets = [part for one in values for part in ("--set", one)]
        command = ("helm", "upgrade", "--install", "finetune-operator", CHART)
        self._shell.run(*command, *place, "--reset-then-reuse-values", "--wait", *sets)

    def _storage(self, kind: str) -> str:
        """Train to the end on a storage class, then lose a pod without a grace period.

        The kubelet may still run the containers of the lost pod while the next attempt starts, so
        the claims on the folders of the job decide which attempt writes.
        """
        namespace = namespace_of(kind)
        self._shell.apply(
            namespace_object(namespace), *copy_objects(namespace, self._options, kind)
        )
        own = ("--namespace", namespace)
        self._shell.kubectl(*own, "wait", "pod/copy", "--for=condition=Ready", "--timeout=15m")
        self._shell.kubectl(*own, "cp", "examples/.quickstart/.", "copy:/data/quickstart")
        self._shell.kubectl(*own, "delete", "pod", "copy", "--grace-period=1")
        whole = self._complete(kind, "whole")
        found, _ = self._recovered(kind, "lost", self._kill)
        return f"{whole}; {found}"

    def _kill(self, pod: Object) -> None:
        metadata = pod["metadata"]
        how = ("--force", "--grace-period=0", "--wait=false")
        own = ("--namespace", metadata["namespace"])
        self._shell.kubectl(*own, "delete", "pod", metadata["name"], *how)

    def _evict(self, pod: Object) -> None:
        node = json.loads(
            self._shell.kubectl("get", "node", pod["spec"]["nodeName"], "--output=json")
        )
        provider = node["spec"]["providerID"]
        found = re.search(
            r"/resourceGroups/([^/]+)/.*/virtualMachineScaleSets/([^/]+)/virtualMachines/(\d+)$",
            provider,
            re.IGNORECASE,
        )
        if found is None:
            raise StepError(f"{provider} is not an instance of a scale set")
        group, scale_set, instance = found.groups()
        place = ("--resource-group", group, "--name", scale_set, "--instance-id", instance)
        self._shell.az("vmss", "simulate-eviction", *place)

    def _complete(self, kind: str, name: str, **spec: Any) -> str:
        """Run a short job to its end."""
        self._submit(kind, name, {"training": {"maxSteps": 4}, **spec})
        started = time.monotonic()
        done = self._wait_for_job(kind, name, is_complete, "to be Complete")
        self._delete(kind, name)
        loss = done["status"].get("progress", {}).get("loss")
        return f"{name}: Complete in {time.monotonic() - started:.0f} s, loss {loss}"

    def _recovered(
        self, kind: str, name: str, disturb: Callable[[Object], None], **spec: Any
    ) -> tuple[str, int]:
        """Disturb an endless job after a checkpoint; return the finding and counted restarts."""
        self._submit(kind, name, {"training": {"maxSteps": 1_000_000}, **spec})
        saved = self._wait_for_job(kind, name, has_checkpoint, "to have a checkpoint")
        attempt = saved["status"]["attempt"]
        own = ("--namespace", namespace_of(kind), "--output=json")
        label = f"finetune.dev/job={name},finetune.dev/attempt={attempt}"
        pods = json.loads(self._shell.kubectl("get", "pods", *own, "--selector", label))["items"]
        disturb(max(pods, key=lambda one: str(one["metadata"]["name"])))
        started = time.monotonic()

        def trains_again(job: Object) -> bool:
            status = job["status"]
            resumed = attempts_in(job).get(status["attempt"], {}).get("resumedStep")
            is_next = status["attempt"] > attempt and resumed is not None
            return is_next and (status.get("progress") or {}).get("step", 0) > resumed

        job = self._wait_for_job(kind, name, trains_again, "to train again")
        seconds = time.monotonic() - started
        ended, resumed = (attempts_in(job)[one] for one in (attempt, job["status"]["attempt"]))
        before = saved["status"]["checkpoint"]["last"]["step"]
        if resumed["resumedStep"] < before:
            raise StepError(f"{name} resumed from step {resumed['resumedStep']}, not {before}")
        counted = job["status"].get("restarts", {}).get("counted", 0)
        self._delete(kind, name)
        return (
            f"{name}: {ended.get('failureClass')}, training again after {seconds:.0f} s from step "
            f"{resumed['resumedStep']}, {counted} counted restarts"
        ), counted

    def _submit(self, kind: str, name: str, spec: Object) -> None:
        self.job = (namespace_of(kind), name)
        self._delete(kind, name)  # of a call that was interrupted
        self._shell.apply(job_object(namespace_of(kind), name, spec))

    def _delete(self, kind: str, name: str) -> None:
        own = ("--namespace", namespace_of(kind))
        self._shell.kubectl(*own, "delete", "finetunejob", name, "--ignore-not-found", "--wait")

    def _wait_for_job(
        self, kind: str, name: str, is_done: Callable[[Object], bool], what: str
    ) -> Object:
        own = ("--namespace", namespace_of(kind), "--output=json")

        def look() -> Object | None:
            job: Object = json.loads(self._shell.kubectl("get", "finetunejob", name, *own))
            conditions = {one["type"]: one for one in job.get("status", {}).get("conditions", ())}
            if conditions.get("Failed", {}).get("status") == "True":
                raise StepError(f"{name} Failed: {conditions['Failed']['message']}")
            return job if "status" in job and is_done(job) else None

        found: Object = self._wait(look, JOB_SECONDS, lambda: f"{name} {what}")
        return found

    def _wait(self, check: Callable[[], Any], seconds: float, what: Callable[[], str]) -> Any:
        end = time.monotonic() + seconds
        while (found := check()) is None:
            if time.monotonic() > end:
                raise StepError(f"timeout after {seconds:.0f} s: {what()}")
            time.sleep(self._options.poll_seconds)
        return found


STEPS: dict[str, Callable[[Hour], str]] = {
    "cluster": Hour.cluster,
    "e2e": Hour.e2e,
    "operator": Hour.operator,
    "files": Hour.files,
    "blobfuse": Hour.blobfuse,
    "gpu": Hour.gpu,
    "spot": Hour.spot,
    "identity": Hour.identity,
    "azureml": Hour.azureml,
}


def workspace_in(text: str) -> str:
    """Return the resource id of the workspace in the text of a FineTuneProfile."""
    found = {
        key: match[1]
        for key in ("subscriptionId", "resourceGroup", "workspace")
        if (match := re.search(rf"^\s*{key}:\s*[\"']?([\w.-]+)", text, re.MULTILINE))
    }
    if len(found) < 3:
        raise StepError("--azureml-profile names no subscriptionId, resourceGroup or workspace")
    return (
        f"/subscriptions/{found['subscriptionId']}/resourceGroups/{found['resourceGroup']}"
        f"/providers/Microsoft.MachineLearningServices/workspaces/{found['workspace']}"
    )
