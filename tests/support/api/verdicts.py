"""What GitOps tools make of a FineTuneJob: their rules as their sources have them, in Python.

The tests hold these twins against the tools' own programs where they are on the PATH: `kstatus`
(Flux's library) and `argo-health SCRIPT` (Argo CD's Lua), each of which reads an object from stdin.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from cel import Context, compile

from finetune_operator.kube.resources import Object

EXAMPLES = Path(__file__).parents[3] / "examples" / "gitops"
HEALTH = "resource.customizations.health.finetune.dev_FineTuneJob"


def kstatus(made: Object) -> str:
    """Return what sigs.k8s.io/cli-utils and Flux's fork of it compute, and with it `wait: true`."""
    if "deletionTimestamp" in made["metadata"]:
        return "Terminating"
    if not _is_observed(made):
        return "InProgress"
    conditions = made.get("status", {}).get("conditions", ())
    for one in conditions:  # the first of these two counts
        if (one["type"], one["status"]) == ("Reconciling", "True"):
            return "InProgress"
        if (one["type"], one["status"]) == ("Stalled", "True"):
            return "Failed"
    is_ready = all(one["status"] == "True" for one in conditions if one["type"] == "Ready")
    return "Current" if is_ready else "InProgress"


def flux_by(expressions: Mapping[str, str], made: Object) -> str:
    """Return what Flux computes with `healthCheckExprs`: the first that holds, in its order."""
    if not _is_observed(made):
        return "InProgress"
    words = {"inProgress": "InProgress", "failed": "Failed", "current": "Current"}
    for name, word in words.items():
        if name in expressions and compile(expressions[name]).execute(Context(made)) is True:
            return word
    return "InProgress"


def argo(script: str, made: Object) -> str:
    """Return what Argo CD computes by a health script, which it runs in Lua 5.1."""
    from lupa import lua51

    if "deletionTimestamp" in made["metadata"]:
        return "Progressing"
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    # Argo CD gives a script no more of Lua's library than these.
    lua.execute("io, os, package, debug, require, dofile, loadfile = nil")
    lua.globals().obj = lua.table_from(made, recursive=True)
    return str(lua.execute(script).status)


def program(command: Sequence[str], made: Object) -> str:
    """Return what a tool's own program says."""
    done = subprocess.run(
        command, input=json.dumps(made), stdout=subprocess.PIPE, text=True, check=True
    )
    return str(json.loads(done.stdout)["status"])


def has_program(name: str) -> bool:
    """Say whether it is on the PATH."""
    return shutil.which(name) is not None


def health_script() -> str:
    """Return the script that examples/gitops/argocd gives to Argo CD."""
    made = yaml.safe_load((EXAMPLES / "argocd" / "health.yaml").read_text(encoding="utf-8"))
    return str(made["data"][HEALTH])


def health_expressions() -> dict[str, str]:
    """Return the expressions that examples/gitops/flux gives to Flux."""
    text = (EXAMPLES / "flux" / "kustomizations.yaml").read_text(encoding="utf-8")
    (found,) = [
        one for made in yaml.safe_load_all(text) for one in made["spec"].get("healthCheckExprs", ())
    ]
    kind: Any = (found.pop("apiVersion"), found.pop("kind"))
    assert kind == ("finetune.dev/v1alpha1", "FineTuneJob")
    return dict(found)


def _is_observed(made: Object) -> bool:
    generation = made["metadata"].get("generation")
    return bool(generation == made.get("status", {}).get("observedGeneration", generation))
