"""A volume of a real cluster, written and read through a pod: tests need no other way to it."""

import base64
import io
import tarfile
from pathlib import Path

from finetune_operator.kube.resources import Object
from support.cluster.real_cluster import RealCluster

CLAIM = "models"
MOUNT = f"/mnt/{CLAIM}"


def on_a_node(cluster: RealCluster, script: str) -> None:
    """Run a script where the folder of the nodes is, as who looks after the nodes would.

    In the namespace `default`, as those of the tests admit no pod of root.
    """
    name, where = "finetune-e2e-folder", ("--namespace", "default")
    folder = cluster.given.node_folder
    container = {
        "name": name,
        "image": cluster.given.trainer_image,
        "command": ["sh", "-ec", script],
        "volumeMounts": [{"name": "folder", "mountPath": folder}],
        "securityContext": {"runAsUser": 0},
    }
    host = {"path": folder, "type": "DirectoryOrCreate"}
    spec = {
        "containers": [container],
        "volumes": [{"name": "folder", "hostPath": host}],
        "restartPolicy": "Never",
    }
    metadata = {"name": name, "namespace": "default"}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    try:
        done = "--for=jsonpath={.status.phase}=Succeeded"
        cluster.kubectl("wait", f"pod/{name}", done, *where, "--timeout=60s")
    finally:
        cluster.kubectl("delete", f"pod/{name}", *where, "--ignore-not-found")


class Volume:
    """A claim that all jobs of a namespace share, and a pod through which tests read and write it.

    Args:
        cluster: Where it is.
        namespace: Its namespace, which exists.
    """

    def __init__(self, cluster: RealCluster, namespace: str) -> None:
        self._cluster = cluster
        self._where = ("--namespace", namespace)
        given = cluster.given
        self._folder = f"{given.node_folder.rstrip('/')}/{namespace}" if given.node_folder else ""
        metadata = {"name": CLAIM, "namespace": namespace}
        size = {"storage": "1Gi"}
        modes = ["ReadWriteMany"]
        claim: Object = {"accessModes": modes, "resources": {"requests": size}}
        if given.storage_class:
            claim["storageClassName"] = given.storage_class
        else:
            # Volumes of a node do not get the pods' fsGroup.
            on_a_node(cluster, f"mkdir -p {self._folder} && chmod 777 {self._folder}")
            self._make_volume(namespace, {"accessModes": modes, "capacity": size})
            claim |= {"storageClassName": "", "volumeName": namespace}
        made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
        cluster.apply({**made, "spec": claim}, self._pod(namespace))
        self._kubectl("wait", "pod/volume", "--for=condition=Ready", "--timeout=300s")

    def close(self) -> None:
        """Delete the files of a folder of the nodes; a storage class looks after its own."""
        if self._folder:
            on_a_node(self._cluster, f"rm -rf {self._folder}/*")

    def _make_volume(self, namespace: str, spec: Object) -> None:
        host = {"path": self._folder, "type": "Directory"}
        claim = {"namespace": namespace, "name": CLAIM}
        spec = {**spec, "storageClassName": "", "hostPath": host, "claimRef": claim}
        metadata = {"name": namespace}
        made = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata}
        self._cluster.apply({**made, "spec": spec})

    def _pod(self, namespace: str) -> Object:
        """Return a pod that waits to be told what to do, within the restricted standard."""
        given = self._cluster.given
        wait = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, {s.SIGTERM}); "
        container = {
            "name": "volume",
            "image": given.trainer_image,
            "command": ["python", "-c", f"{wait} s.sigwait({{s.SIGTERM}})"],
            "volumeMounts": [{"name": "claim", "mountPath": MOUNT}],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        spec: Object = {
            "containers": [container],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": CLAIM}}],
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        metadata = {"name": "volume", "namespace": namespace}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def put(self, folder: Path) -> None:
        """Copy what is in the folder to the volume's root."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, ".")
        self._python(
            "import sys, tarfile\n"
            "archive = tarfile.open(fileobj=sys.stdin.buffer, mode='r|')\n"
            # Python 3.11.2, that of Debian 12, has no filters.
            "archive.extraction_filter = getattr(tarfile, 'data_filter', None)\n"
            f"archive.extractall('{MOUNT}')",
            stdin=packed.getvalue(),
        )

    def get(self, path: str, to: Path) -> Path:
        """Copy a folder of the volume into `to`; return where it is."""
        text = self._python(
            "import base64, io, tarfile\n"
            "packed = io.BytesIO()\n"
            "with tarfile.open(fileobj=packed, mode='w') as archive:\n"
            f"    archive.add('{MOUNT}/{path}', '.')\n"
            "print(base64.b64encode(packed.getvalue()).decode())"
        )
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text))) as archive:
            archive.extractall(to, filter="data")
        return to

    def has(self, pattern: str, seconds: float = 5) -> bool:
        """Say whether a file is there; the pod itself waits for it, so that no moment is lost."""
        program = (
            "import glob, time\n"
            f"end = time.monotonic() + {seconds}\n"
            f"while not (found := glob.glob('{MOUNT}/{pattern}')) and time.monotonic() < end:\n"
            "    time.sleep(0.02)\n"
            "print(*found[:1])"
        )
        return bool(self._python(program).strip())

    def _python(self, program: str, stdin: bytes | None = None) -> str:
        return self._kubectl("exec", "-i", "volume", "--", "python", "-c", program, stdin=stdin)

    def _kubectl(self, *arguments: str, stdin: bytes | None = None) -> str:
        return self._cluster.kubectl(*self._where, *arguments, stdin=stdin)
