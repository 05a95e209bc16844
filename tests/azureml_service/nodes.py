"""A node of a job: a process on this machine, with what Azure ML gives it and a disk of its own."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from azureml_service.answers import Json
from azureml_service.jobs import Job
from azureml_service.resources import WORKSPACE_ID

_DATASTORE = re.compile(r"(?:.*/)?datastores/([^/]+)/paths/?(.*)")
_MODEL = re.compile(r"(?:.*/registries/([^/]+)|.*)/models/([^/]+)/versions/([^/]+)")
_BINDING = re.compile(r"\$\{\{(inputs|outputs)\.(\w+)\}\}")


class MountError(Exception):
    """What a job reads is not there."""


@dataclass(frozen=True)
class Place:
    """Where the service stands.

    Attributes:
        base: URL of the service.
        root: Folder of datastores and registered models.
        folder: Folder of the nodes' disks.
        image: Variables that the image of each environment sets.
    """

    base: str
    root: Path
    folder: Path
    image: Mapping[str, str]

    def of_uri(self, uri: str) -> Path:
        """Return the folder that a URI names.

        Raises:
            MountError: it names nothing that this service has.
        """
        if match := _DATASTORE.fullmatch(uri):
            return self.root / "datastores" / match[1] / match[2]
        if match := _MODEL.fullmatch(uri):
            registry = self.root / "registries" / match[1] if match[1] else self.root
            return registry / "models" / match[2] / match[3]
        raise MountError(f"ScriptExecution.StreamAccess.Validation: {uri} is not valid")


@dataclass(frozen=True)
class Rank:
    """Which process of a job this is, and where they meet.

    Attributes:
        nodes: Of the job.
        on_node: Processes of each node.
        port: Where the first listens; None without a distribution.
    """

    node: int
    local: int
    nodes: int
    on_node: int
    port: int | None

    @property
    def number(self) -> int:
        """Among all processes."""
        return self.node * self.on_node + self.local

    @property
    def log_path(self) -> str:
        """The log file as Azure ML names it."""
        alone = self.nodes * self.on_node == 1
        return f"user_logs/std_log{'' if alone else f'_process_{self.number}'}.txt"

    def variables(self) -> dict[str, str]:
        """Return what tells a process its place."""
        if self.port is None:
            return {}
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "NODE_RANK": str(self.node),
            "RANK": str(self.number),
            "LOCAL_RANK": str(self.local),
            "WORLD_SIZE": str(self.nodes * self.on_node),
        }


class Process:
    """The command of a job on a node, which runs until it ends or `kill`.

    Args:
        job: Whose command it is.
        rank: Which process.
        place: Where.
        token: Of the run.

    Raises:
        MountError: what the job reads is not there.
    """

    def __init__(self, job: Job, rank: Rank, place: Place, token: str) -> None:
        disk = place.folder / job.name / f"{job.starts}-{rank.number}"
        self._temporary = disk / "tmp"
        for folder in (self._temporary, disk / "wd"):
            folder.mkdir(parents=True)
        mounts = _mount(job, place, disk / "wd")
        self.log = disk / "log.txt"
        environ = {
            **place.image,
            **(job.properties.get("environmentVariables") or {}),
            **_variables(job, rank, place, token),
            **{f"AZURE_ML_{name.upper()}": path for name, path in mounts.items()},
            "TMPDIR": str(self._temporary),
        }
        command = _BINDING.sub(
            lambda match: mounts[f"{match[1].removesuffix('s')}_{match[2]}"],
            job.properties["command"],
        )
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", command],
                cwd=disk / "wd",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Its exit code as a shell tells it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to the main process, as the end of a container does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every process of the node at once."""
        marker = f"TMPDIR={self._temporary}".encode()
        while pids := _pids_with(marker):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has ended meanwhile
            time.sleep(0.005)
        self._process.wait()


def _pids_with(variable: bytes) -> list[int]:
    """Return the processes with this variable that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended, or is not ours
    return found


def _mount(job: Job, place: Place, folder: Path) -> dict[str, str]:
    """Return the path or the value of each input and output; what is mounted is a link in `folder`.

    Raises:
        MountError: an input is not there.
    """
    mounted: dict[str, str] = {}
    for kind in ("input", "output"):
        given: dict[str, Json] = job.properties.get(f"{kind}s") or {}
        for name, one in given.items():
            key = f"{kind}_{name}"
            if one.get(f"job{kind.capitalize()}Type") == "literal":
                mounted[key] = one["value"]
                continue
            target = place.of_uri(one["uri"])
            if kind == "output":
                target.mkdir(parents=True, exist_ok=True)
            elif not target.exists():
                raise MountError(
                    f"ScriptExecution.StreamAccess.NotFound: input '{name}' {one['uri']} not found"
                )
            link = folder / f"{kind.upper()}_{name}"
            link.symlink_to(target)
            mounted[key] = str(link)
    return mounted


def _variables(job: Job, rank: Rank, place: Place, token: str) -> dict[str, str]:
    _, _, subscription, _, group, *_ = job.workspace.id.split("/")
    experiment = job.properties.get("experimentName") or "Default"
    scope = f"{job.workspace.id}/experiments/{experiment}"
    host = place.base.removeprefix("https://")
    return {
        "AZUREML_ARM_SUBSCRIPTION": subscription,
        "AZUREML_ARM_RESOURCEGROUP": group,
        "AZUREML_ARM_WORKSPACE_NAME": job.workspace.name,
        "AZUREML_ARM_PROJECT_NAME": experiment,
        "AZUREML_DISCOVERY_SERVICE_ENDPOINT": f"{place.base}/discovery",
        "AZUREML_EXPERIMENT_ID": experiment_id(experiment),
        "AZUREML_EXPERIMENT_SCOPE": scope,
        "AZUREML_NODE_COUNT": str(rank.nodes),
        "AZUREML_PROCESS_NAME": f"rank_{rank.number}" if rank.port else "main",
        "AZUREML_ROOT_RUN_ID": job.name,
        "AZUREML_RUN_ID": job.name,
        "AZUREML_RUN_TOKEN": token,
        "AZUREML_SERVICE_ENDPOINT": place.base,
        "AZUREML_WORKSPACE_ID": WORKSPACE_ID,
        "AZUREML_WORKSPACE_SCOPE": job.workspace.id,
        "MLFLOW_EXPERIMENT_ID": experiment_id(experiment),
        "MLFLOW_EXPERIMENT_NAME": experiment,
        "MLFLOW_RUN_ID": job.name,
        "MLFLOW_TRACKING_TOKEN": token,
        "MLFLOW_TRACKING_URI": f"azureml://{host}/mlflow/v2.0{job.workspace.id}",
        **rank.variables(),
    }


def experiment_id(name: str) -> str:
    """Return the id of an experiment."""
    return f"experiment-{name}"
