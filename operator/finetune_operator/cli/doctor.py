"""`ftctl doctor`: report installed and missing packages, with the command that installs them.

The command reads package metadata and imports no library, so it is fast and works even if an
installed library is broken.
"""

import asyncio
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from enum import StrEnum
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune_operator.api.validation import load_job
from finetune_operator.backends import registry
from finetune_operator.backends.local.machine_checks import usable_cores
from finetune_operator.cli.bundle import ALWAYS, Bundle, new_file
from finetune_operator.cli.bundle_cluster import add_cluster_job
from finetune_operator.cli.bundle_here import add_run_directory
from finetune_operator.cli.doctor_azureml import examine_azureml
from finetune_operator.cli.doctor_cluster import examine_cluster
from finetune_operator.cli.findings import Finding, State
from finetune_operator.cli.output import takes_unicode
from finetune_operator.cli.run_directories import run_directory
from finetune_operator.errors import BrokenBackendError
from finetune_operator.extras import DISTRIBUTION

_FOR_USERS = ("trainer", "deepspeed", "qlora", "gpu", "azureml")
"""Extras to propose; the others are for the operator's image, for developers and for examples."""
GIB = 2**30


class FindingsFormat(StrEnum):
    """Output format of findings."""

    TEXT = "text"
    JSON = "json"


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE|NAME", help="Manifest; NAME with --bundle.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    output: Annotated[
        FindingsFormat, typer.Option("-o", "--output", help="text or json.")
    ] = FindingsFormat.TEXT,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Check the cluster that kubectl uses; only reads."),
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="For --cluster: the namespace of your jobs."),
    ] = None,
    azureml: Annotated[
        bool,
        typer.Option(
            "--azureml", help="Check that the Azure resources in a profile exist; only reads."
        ),
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="FineTuneProfiles for --azureml.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tar.gz|FOLDER",
            help="Write a support bundle for an issue to a new file, or to a folder.",
        ),
    ] = None,
) -> None:
    """Show which packages are installed, which are missing, and the command that installs them.

    With FILE, check what its job needs on this machine; else what a run with LoRA needs.

    With --azureml, check instead that the workspace, computes, environments and datastores of the
    profiles in a file exist in Azure, and that you may read them.

    With --cluster, check a cluster: API server, CustomResourceDefinitions, the operator's replicas
    and Lease, your permissions, profiles, queues, shared storage, GPU nodes, and the admission
    policy.

    With --bundle, write the findings and the status, Events and ends of the logs of a job to an
    archive without credentials, environment values and data: of the job of a manifest, run
    directory or name here, or with --cluster. Look through the archive before you send it.

    The exit code is 1 if something is missing that a run needs, else 0. Checks that could not be
    run are shown and do not count.
    """
    as_json = as_json or output is FindingsFormat.JSON
    _refuse(
        {
            "--profile has no effect without --azureml; add that": profile and not azureml,
            "--namespace has no effect without --cluster; add that": namespace and not cluster,
            "--azureml and --cluster exclude each other; leave out one": azureml and cluster,
            "--bundle excludes --azureml, --json and -o json": bundle and (azureml or as_json),
            "FILE has no effect with --cluster and --azureml; leave it out": (
                file and not bundle and (cluster or azureml)
            ),
        }
    )
    if bundle is not None:
        _write_bundle(bundle, str(file or ""), namespace, is_in_cluster=cluster)
        return
    if cluster:
        findings = asyncio.run(examine_cluster(namespace))
    elif azureml:
        findings = examine_azureml(profile, os.environ)
    else:
        findings = examine(os.environ, Path.cwd(), needed_extras(file))
    if as_json:
        shown = [_as_json(one) for one in findings]
        print(json.dumps(shown, indent=2, ensure_ascii=not takes_unicode()))
    else:
        print_findings(findings)
    if any(finding.state is State.MISSING for finding in findings):
        raise typer.Exit(1)


def _refuse(combinations: Mapping[str, object]) -> None:
    for sentence, is_given in combinations.items():
        if is_given:
            raise typer.BadParameter(sentence)


def _write_bundle(wanted: Path, job: str, namespace: str | None, *, is_in_cluster: bool) -> None:
    manifest = load_job(Path(job), may_resume=True) if os.path.isfile(job) else None
    name = manifest[0].metadata.name if manifest else Path(job).name
    contents = Bundle()
    with new_file(wanted, name) as (path, file):
        if job and is_in_cluster:
            namespace = namespace or (manifest[0].metadata.namespace if manifest else None)
            asyncio.run(add_cluster_job(contents, name, namespace))
        elif job:
            add_run_directory(contents, run_directory(job, manifest))
        tables = {"machine": examine(os.environ, Path.cwd())}
        if is_in_cluster:
            tables["cluster"] = asyncio.run(examine_cluster(namespace))
            contents.users |= {one.detail for one in tables["cluster"] if one.name == "user"}
        for topic, findings in tables.items():
            text = StringIO()
            print_findings(findings, text)
            contents.files[f"doctor/{topic}.txt"] = text.getvalue()
        contents.write(file, f"Support bundle of {job or 'this machine'}")
    print(f"{path}: {len(contents.files)} files\nLeft out:")
    for sentence in (*contents.left_out, *ALWAYS):
        print(f"- {sentence}")
    print(
        "\nLook through the files before you send them: names of namespaces, folders, images and "
        "hosts remain, and a\nlog contains whatever a program has printed:"
        f"\n\ntar -xOzf {shlex.quote(str(path))} | less"
    )


def _as_json(finding: Finding) -> dict[str, str]:
    fields: dict[str, str] = asdict(finding)
    fields["command"] = fields.pop("remedy") or install_command([finding])
    return fields


def needed_extras(file: Path | None) -> frozenset[str]:
    """Return the extras that a job needs where `ftctl` runs; without a file, of a local run.

    Raises:
        InvalidJobError: the manifest is refused.
    """
    if file is None:
        return frozenset({"trainer"})
    job, _ = load_job(file, default_backend="local")
    spec = job.spec
    if spec.backend.type == "azureml":
        return frozenset({"azureml"})
    if spec.backend.type != "local":
        return frozenset()  # the trainer's image has them
    needed = {"trainer"}
    if spec.strategy.type.startswith("zero"):
        needed.add("deepspeed")
    if spec.method.type == "qlora":
        needed.add("qlora")
    if spec.training.liger or spec.training.float8:
        needed.add("gpu")
    return frozenset(needed)


def examine(
    environ: Mapping[str, str], folder: Path, needed: Collection[str] = ("trainer",)
) -> list[Finding]:
    """Check this machine, and return a finding per check; `needed` are extras of this package."""
    requirements = metadata.requires(DISTRIBUTION) or []
    return [
        *_machine(folder),
        _gpus(),
        _hub_token(environ),
        *_backends(),
        *packages(requirements, _installed_version, needed),
    ]


def packages(
    requirements: list[str],
    version_of: Callable[[str], str | None],
    needed: Collection[str] = ("trainer",),
) -> list[Finding]:
    """Compare the requirements of the `needed` and other extras with the installed packages."""
    found = []
    for requirement in requirements:
        spec, _, marker = (part.strip() for part in requirement.partition(";"))
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        name = re.match(r"[\w.-]+", spec)
        topic = extra[1] if extra else "ftctl"
        if name is None or name[0] == DISTRIBUTION or topic not in ("ftctl", *_FOR_USERS):
            continue
        version = version_of(name[0])
        absent = State.MISSING if topic in ("ftctl", *needed) else State.ABSENT
        found.append(_package(topic, name[0], version, absent, f'"{spec}"'))
    return found


def install_command(findings: list[Finding]) -> str:
    """Return the command that installs all requirements; empty if there are none."""
    wanted = dict.fromkeys(finding.requirement for finding in findings if finding.requirement)
    if not wanted:
        return ""
    # The environment of a tool that uv has installed has no pip.
    program = f'"{sys.executable}" -m pip install'
    if _installed_version("pip") is None:
        program = f'uv pip install --python "{sys.executable}"'
    return f"{program} {' '.join(wanted)}"


def _package(
    topic: str, name: str, version: str | None, absent: State, requirement: str
) -> Finding:
    if version is not None:
        return Finding(topic, name, State.OK, version)
    return Finding(topic, name, absent, requirement=requirement)


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine(folder: Path) -> list[Finding]:
    cores = usable_cores()
    free = shutil.disk_usage(folder).free / GIB
    return [
        Finding("machine", "python", State.OK, f"{platform.python_version()} ({sys.executable})"),
        Finding("machine", "cores", State.OK, str(cores)),
        Finding("machine", "disk", State.OK, f"{free:.1f} GiB free in {folder}"),
    ]


def _gpus() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("machine", "GPUs", State.ABSENT, "no nvidia-smi; gpusPerNode: 0 runs on CPU")
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except subprocess.TimeoutExpired:
        return Finding("machine", "GPUs", State.ABSENT, "nvidia-smi did not respond within 10 s")
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not names:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return Finding("machine", "GPUs", State.ABSENT, lines[0] if lines else "none found")
    return Finding("machine", "GPUs", State.OK, f"{len(names)}: {'; '.join(names)}")


def _hub_token(environ: Mapping[str, str]) -> Finding:
    """Look for the token in the same places as huggingface_hub, without showing it."""
    home = Path(environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    file = Path(environ.get("HF_TOKEN_PATH", home / "token")).expanduser()
    if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
        return Finding("machine", "hub token", State.OK, "set in the environment")
    if file.is_file():
        return Finding("machine", "hub token", State.OK, f"set in {file}")
    return Finding("machine", "hub token", State.ABSENT, "needed only for gated models; HF_TOKEN")


def _backends() -> list[Finding]:
    """Import each backend to see whether it works; no backend imports a large library."""
    names, found = registry.available(), []
    for name in names:
        finding = Finding("backends", name, State.OK)
        try:
            registry.load(name)
        except BrokenBackendError as error:
            state = State.MISSING if name == "local" else State.ABSENT
            finding = Finding("backends", name, state, str(error))
        found.append(finding)
    if "local" not in names:
        found.append(Finding("backends", "local", State.MISSING, "not registered", DISTRIBUTION))
    return found


def print_findings(findings: list[Finding], file: TextIO | None = None) -> None:
    """Print a table for each topic, and the commands that fix faults; by default to stdout."""
    width = (
        None if (file or sys.stdout).isatty() else 200
    )  # else files and logs have folded columns
    console = Console(soft_wrap=True, highlight=False, width=width, file=file)
    marks = {
        State.OK: ("ok", "green"),
        State.ABSENT: ("-", "dim"),
        State.MISSING: ("no", "red"),
        State.UNKNOWN: ("?", "yellow"),
    }
    for topic in dict.fromkeys(finding.topic for finding in findings):
        console.print(Text(topic, style="bold"))
        table = Table.grid(padding=(0, 2))
        for _ in range(4):
            table.add_column(overflow="fold")
        for finding in findings:
            if finding.topic == topic:
                table.add_row(
                    Text("  "), Text(*marks[finding.state]), finding.name, Text(finding.detail)
                )
        console.print(table)
    for state, heading in (
        (State.MISSING, "A run on this machine needs"),
        (State.ABSENT, "Not installed, and not needed for a run on this machine"),
    ):
        _print_commands(console, heading, [one for one in findings if one.state is state])
    for state, heading in (
        (State.MISSING, "Commands that fix it"),
        (State.ABSENT, "Optional, and not present"),
    ):
        _print_remedies(console, heading, [one for one in findings if one.state is state])


def _print_commands(console: Console, heading: str, findings: list[Finding]) -> None:
    """Print one command per topic, so that each can be pasted on its own."""
    topics = dict.fromkeys(finding.topic for finding in findings if finding.requirement)
    if topics:
        console.print(Text(f"\n{heading}:", style="bold"))
    for topic in topics:
        console.print(Text(install_command([one for one in findings if one.topic == topic])))


def _print_remedies(console: Console, heading: str, findings: list[Finding]) -> None:
    """Print each command once, below the findings that it fixes."""
    fixes: dict[str, list[str]] = {}
    for finding in findings:
        if finding.remedy:
            fixes.setdefault(finding.remedy, []).append(f"{finding.topic}, {finding.name}")
    if fixes:
        console.print(Text(f"\n{heading}:", style="bold"))
    for remedy, names in fixes.items():
        console.print(Text(f"# {'; '.join(names)}", style="dim"))
        console.print(Text(remedy))
