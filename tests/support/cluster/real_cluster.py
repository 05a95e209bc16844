"""A cluster with nodes, as its users see it: through kubectl, helm and ftctl.

Named by the environment:

    FINETUNE_E2E_KUBECONFIG       a cluster that knows no FineTuneJobs yet and may be changed
    FINETUNE_E2E_OPERATOR_IMAGE   the operator's image, which the nodes have or can pull
    FINETUNE_E2E_TRAINER_IMAGE    the trainer's
    FINETUNE_E2E_STORAGE_CLASS    a class whose volumes several pods can write (ReadWriteMany), or
    FINETUNE_E2E_NODE_FOLDER      a folder that every node has under this path, with the same files
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.kube.resources import Object

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "finetune-operator"
OPERATOR_NAMESPACE = "finetune-operator"
RELEASE = "finetune-operator"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
FTCTL = (sys.executable, "-m", "finetune_operator")
_START = "FINETUNE_E2E_"


@dataclass(frozen=True)
class Given:
    """What the environment says of the cluster."""

    kubeconfig: str
    operator_image: str
    trainer_image: str
    storage_class: str
    node_folder: str

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "Given | None":
        """Return it, or None where no cluster is named."""
        names = {_START + one.name.upper(): one.name for one in fields(cls)}
        unknown = [one for one in environ if one.startswith(_START) and one not in names]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(names)}")
        made = cls(**{name: environ.get(variable, "") for variable, name in names.items()})
        return made if made.kubeconfig else None

    def lacking(self) -> str:
        """Say what of the environment is missing; empty if nothing is."""
        for name in ("operator_image", "trainer_image"):
            if not getattr(self, name):
                return f"{_START}{name.upper()} names no image; make images builds one"
        if bool(self.storage_class) == bool(self.node_folder):
            return f"one of {_START}STORAGE_CLASS and {_START}NODE_FOLDER must say where files are"
        return ""


class RealCluster:
    """The programs a user has, all asking the same cluster."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self._environ = {**os.environ, "KUBECONFIG": given.kubeconfig}

    def run(self, *command: str, stdin: bytes | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a program and return what it said, whatever it was."""
        done = subprocess.run(command, input=stdin, capture_output=True, env=self._environ)
        said = (done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        return subprocess.CompletedProcess(command, done.returncode, *said)

    def kubectl(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run kubectl, which must succeed; return what it printed."""
        return self._expect(self.run("kubectl", *arguments, stdin=stdin))

    def helm(self, *arguments: str, values: Object | None = None) -> str:
        """Run helm in the operator's namespace with these values; it must succeed."""
        given = ["--values", "-"] if values is not None else []
        command = ["helm", *arguments, "--namespace", OPERATOR_NAMESPACE, *given]
        return self._expect(self.run(*command, stdin=json.dumps(values).encode()))

    def ftctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ftctl."""
        return self.run(*FTCTL, *arguments)

    def start_ftctl(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start ftctl, and read what it prints while it runs."""
        return self.start(*FTCTL, *arguments)

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a program, and read its output while it runs."""
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environ)

    def apply(self, *objects: Object) -> None:
        """Run `kubectl apply` on these."""
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects).encode())

    def list(self, kinds: str, *arguments: str) -> list[Object]:
        """Return what `kubectl get` finds, with who wrote which field."""
        how = ("-o", "json", "--show-managed-fields")
        found = json.loads(self.kubectl("get", kinds, *arguments, *how))
        items: list[Object] = found["items"]
        return items

    def may(self, account: str, verb: str, kind: str) -> bool:
        """Say whether an account may do that in some namespace that is not its own."""
        who = f"--as=system:serviceaccount:{OPERATOR_NAMESPACE}:{account}"
        answer = self.run("kubectl", "auth", "can-i", verb, kind, who, "--namespace", "default")
        return answer.stdout.strip() == "yes"

    @staticmethod
    def _expect(done: "subprocess.CompletedProcess[str]") -> str:
        assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout}{done.stderr}"
        return done.stdout


class Release:
    """The chart in the cluster, installed as docs/installation.md says.

    Attributes:
        side: Options of helm that say who merges.
    """

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster = cluster
        # helm 4.0.0 cannot apply kept definitions on the server's side; helm 3 does not know how.
        is_new = cluster.run("helm", "version", "--short").stdout.startswith("v4")
        self.side = ["--server-side=false"] if is_new else []

    def install(self, **values: Any) -> None:
        """Install the chart and wait until it is ready."""
        self._helm("install", values)

    def upgrade(self, **values: Any) -> None:
        """Upgrade the release and wait until its new pods are ready and the old ones gone."""
        self._helm("upgrade", values)
        where = ("--namespace", OPERATOR_NAMESPACE)
        self._cluster.kubectl("rollout", "status", f"deployment/{RELEASE}", *where)

    def uninstall(self) -> None:
        """Uninstall the release and wait until it is gone."""
        self._cluster.helm("uninstall", RELEASE, "--wait")

    def pods(self) -> list[Object]:
        """Return the operator's pods."""
        return self._cluster.list("pods", "--namespace", OPERATOR_NAMESPACE)

    def leader(self) -> str:
        """Return the name of the pod that holds the Lease; empty if none does."""
        (lease,) = self._cluster.list("leases", "--namespace", OPERATOR_NAMESPACE)
        return str(lease["spec"].get("holderIdentity") or "")

    def _helm(self, verb: str, values: Object) -> None:
        arguments = [verb, RELEASE, str(CHART), *self.side, "--wait", "--timeout", "3m"]
        self._cluster.helm(*arguments, values={**self.values(), **values})

    def values(self) -> Object:
        """Return what differs from the default values."""
        given = self._cluster.given
        name, _, digest = given.operator_image.partition("@")
        repository, _, tag = name.rpartition(":")
        image = {"repository": repository, "tag": tag, "digest": digest}
        return {"image": image}


def namespace(name: str) -> Object:
    """Return a namespace that admits no pod but of the restricted standard."""
    metadata = {"name": name, "labels": RESTRICTED}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
