"""An API server of a test, and the programs that apply manifests to it as users and tools do."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from finetune_operator.kube.resources import Object

ROOT = Path(__file__).parents[3]
INSTALL = ROOT / "charts" / "kustomize" / "install.yaml"
KINDS = (
    "namespaces,customresourcedefinitions,serviceaccounts,services,deployments,poddisruptionbudgets,"
    "networkpolicies,clusterroles,clusterrolebindings,roles,rolebindings"
)
OURS = "finetunejobs,finetuneprofiles"


@dataclass(frozen=True)
class Cluster:
    """A cluster, as programs see it that read KUBECONFIG."""

    kubeconfig: Path

    def run(self, *command: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a program and return what it said, whatever it was."""
        environ = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        # kubectl keeps what it knows of a cluster by its address, which was another one's before.
        environ["KUBECACHEDIR"] = str(self.kubeconfig.parent / "cache")
        return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environ)

    def must(self, *command: str, stdin: str | None = None) -> str:
        """Run a program, which must succeed without a warning; return what it printed."""
        done = self.run(*command, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, ""), f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def apply(self, objects: Iterable[Object], *options: str) -> str:
        """Apply objects by the API server, as `options` say; it must succeed."""
        text = yaml.safe_dump_all(objects)
        return self.must("kubectl", "apply", "--server-side", *options, "-f", "-", stdin=text)

    def differences(self, objects: Iterable[Object], *options: str) -> str:
        """Return what `kubectl diff` prints; empty where applying them would change nothing."""
        text = yaml.safe_dump_all(objects)
        done = self.run("kubectl", "diff", *options, "-f", "-", stdin=text)
        assert done.returncode in (0, 1), done.stderr  # 1: it has found some
        return done.stdout

    def establish(self) -> None:
        """Wait until the definitions are served."""
        kind = ("crd", "--all", "--timeout=60s")
        self.must("kubectl", "wait", "--for=condition=Established", *kind)

    def objects(self, kinds: str = KINDS, *options: str) -> list[Object]:
        """Return every object of these kinds, in all namespaces."""
        where = ("--all-namespaces", "-o", "json", *options)
        found: list[Object] = json.loads(self.must("kubectl", "get", kinds, *where))["items"]
        return found

    def versions(self, kinds: str = KINDS) -> dict[str, str]:
        """Return the resourceVersion of every object of these kinds, which each change moves."""
        return {
            f"{one['kind']} {one['metadata'].get('namespace')}/{one['metadata']['name']}": one[
                "metadata"
            ]["resourceVersion"]
            for one in self.objects(kinds)
        }


def read(*files: Path) -> list[Object]:
    """Return the objects of these files."""
    return [one for file in files for one in yaml.safe_load_all(file.read_text()) if one]


def rendered(*command: str) -> list[Object]:
    """Return the objects that a program prints."""
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [one for one in yaml.safe_load_all(made) if one]


def in_stages(objects: Sequence[Object]) -> tuple[list[Object], list[Object]]:
    """Return what tools apply first, namespaces and definitions, and the rest."""
    early = ("Namespace", "CustomResourceDefinition")
    first = [one for one in objects if one["kind"] in early]
    return first, [one for one in objects if one["kind"] not in early]
