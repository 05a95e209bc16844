"""First hour on Azure: run the steps that need a subscription, and write a table of the results.

    PYTHONPATH=tests python tests/live/first_hour.py --location REGION --registry NAME.azurecr.io

This checks the preconditions and lists the resources that cost money. With `--yes` it creates them
and runs the steps; a further call resumes at the first step that has not passed. `--clean` deletes
the resources. docs/how-to/first-hour-on-azure.md describes the steps.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from support.first_hour.preconditions import PRECONDITIONS, tag_of
from support.first_hour.shell import (
    NUM_GPU_NODES,
    NUM_SPOT_NODES,
    NUM_SYSTEM_NODES,
    ROOT,
    STORAGE,
    TAG,
    Object,
    Options,
    Shell,
    SkippedError,
    State,
    StepError,
)
from support.first_hour.steps import STEPS, Hour


def resources_of(options: Options) -> str:
    """Return the list of resources that cost money."""
    cpu, gpu = options.cpu_size, options.gpu_size
    return f"""\
Resource group {options.name} in {options.location}, deleted with --clean, with
- an AKS cluster (tier Free) with {NUM_SYSTEM_NODES} nodes {cpu}, a load balancer and a public IP
- a node pool with {NUM_GPU_NODES} node {gpu}, deleted when its step has passed
- a node pool with {NUM_SPOT_NODES} to {NUM_SPOT_NODES + 1} spot nodes {cpu}, deleted likewise
- storage accounts (Premium): volumes of 100 GiB on {" and ".join(STORAGE.values())}
- a managed identity, without cost
Outside of the group, only with --azureml-profile: a role assignment on the workspace, and two jobs
of minutes on one node of its compute."""


def table_of(steps: Mapping[str, Object]) -> str:
    """Return the table of the steps in Markdown."""
    rows = ["| step | result | seconds | found |", "|---|---|---|---|"]
    for name in STEPS:
        one = steps.get(name, {"result": "not run yet", "seconds": "", "found": ""})
        found = str(one["found"]).replace("|", "\\|").replace("\n", " ")
        rows.append(f"| `{name}` | {one['result']} | {one['seconds']} | {found} |")
    return "\n".join(rows)


def versions(shell: Shell) -> str:
    """Return the versions of the programs, and the commit."""
    client = json.loads(shell.kubectl("version", "--client", "--output=json"))["clientVersion"]
    parts = {
        "commit": shell.run("git", "rev-parse", "--short=10", "HEAD").strip(),
        "az": shell.az("version")["azure-cli"],
        "kubectl": client["gitVersion"],
        "helm": shell.run("helm", "version", "--short").strip(),
    }
    return ", ".join(f"{name} {one}" for name, one in parts.items())


def write_result(options: Options, state: State, programs: str) -> None:
    """Write the table to `result.md`."""
    head = f"First hour on Azure, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    where = f"{options.location}, {options.cpu_size}, {options.gpu_size}"
    text = f"{head}: {where}; {programs}\n\n{table_of(state.steps)}\n"
    (options.folder / "result.md").write_text(text)


def run_steps(shell: Shell, options: Options, state: State) -> int:
    """Run the steps that have not passed; stop at the first failure."""
    hour, programs = Hour(shell, options, state), versions(shell)
    for name, step in STEPS.items():
        if state.has_passed(name):
            print(f"{name}: passed before", flush=True)
            continue
        print(f"{name}: {(step.__doc__ or '').splitlines()[0]}", flush=True)
        started = time.monotonic()
        try:
            result, found = "passed", step(hour)
        except SkippedError as error:
            result, found = "skipped", str(error)
        except StepError as error:
            result, found = "failed", str(error)
        seconds = round(time.monotonic() - started)
        state.steps[name] = {"result": result, "seconds": seconds, "found": found}
        state.save()
        write_result(options, state, programs)
        print(f"{name}: {result} after {seconds} s: {found}", flush=True)
        if result == "failed":
            _add_bundle(shell, options, *hour.job)
            print(f"Fix it and repeat the command, or send {options.folder} (not the kubeconfig)")
            return 1
    print(f"The table is in {options.folder / 'result.md'}; now run the command with --clean")
    return 0


def _add_bundle(shell: Shell, options: Options, namespace: str, job: str) -> None:
    if not job:
        return
    place = ("--cluster", "--namespace", namespace, "--bundle", str(options.folder.resolve()))
    try:
        print(shell.run("ftctl", "doctor", job, *place))
    except StepError as error:
        print(f"no support bundle: {error}")


def clean(shell: Shell, options: Options) -> int:
    """Delete the role assignments and the resource group of this checkout's earlier calls."""
    state = State.load(options.folder)
    if not state.path.exists():
        print(f"{options.folder} has no state of an earlier call, so no resource is known")
        return 1
    has_group = bool(shell.az("group", "exists", "--name", state.name))
    if has_group and tag_of(shell, state.name) != state.id:
        print(f"resource group {state.name} was not created from this checkout; not deleted")
        return 1
    for role in state.roles:
        shell.az("role", "assignment", "delete", "--ids", role)
    if has_group:
        shell.az("group", "delete", "--name", state.name, "--yes")
    state.path.unlink()
    shell.kubeconfig.unlink(missing_ok=True)
    print(f"Deleted {state.name}; {options.folder / 'result.md'} remains")
    return 0


def parse(arguments: list[str]) -> tuple[Options, argparse.Namespace]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bake = json.loads((ROOT / "docker-bake.json").read_text())["variable"]
    for name, default, text in (
        ("location", "", "Azure region"),
        ("registry", "", "registry with finetune-operator and finetune-trainer"),
        ("version", bake["VERSION"]["default"], "tag of both images"),
        ("name", TAG, "name of the resource group and of the cluster"),
        ("cpu-size", "Standard_D4s_v5", "VM size of nodes without GPUs"),
        ("gpu-size", "Standard_NC4as_T4_v3", "VM size with one GPU"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{text} ({default or 'required'})")
    parser.add_argument("--azureml-profile", type=Path, help="file of a FineTuneProfile")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "first-hour")
    parser.add_argument("--poll-seconds", type=float, default=10.0)
    parser.add_argument("--yes", action="store_true", help="create the resources, run the steps")
    parser.add_argument("--clean", action="store_true", help="delete the resources")
    found = parser.parse_args(arguments)
    if not found.clean and not (found.location and found.registry):
        parser.error("--location and --registry are required")
    fields = {key: value for key, value in vars(found).items() if key not in ("yes", "clean")}
    return Options(**fields), found


def main(arguments: list[str]) -> int:
    """Run the command line, and return the exit code."""
    options, given = parse(arguments)
    shell = Shell(options)
    try:
        if given.clean:
            return clean(shell, options)
        for name, check in PRECONDITIONS.items():
            try:
                print(f"{name}: {check(shell, options)}", flush=True)
            except StepError as error:
                raise StepError(f"{name}: {error}") from error
        print(f"\n{resources_of(options)}\n", flush=True)
        if not given.yes:
            print("To create the resources, add --yes.")
            return 0
        state = State.load(options.folder)
        state.name = options.name
        state.save()  # before the first resource, so that --clean finds its tag
        return run_steps(shell, options, state)
    except StepError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
