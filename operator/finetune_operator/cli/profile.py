"""`ftctl profile`: record a profile of the next steps of a running job, and print its path."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import typer

from finetune_operator.api.validation import load_job
from finetune_operator.backends import registry
from finetune_operator.backends.kubernetes.child_names import BACKEND as KUBERNETES
from finetune_operator.cli.conclusion import EXIT_STOPPED
from finetune_operator.cli.run_directories import run_directory
from finetune_operator.cli.top_cluster import backend_of, get_job, metrics_port, pods_of
from finetune_operator.cli.top_here import job_in
from finetune_operator.cli.top_rows import count_in, get_in
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.port_forward import PodRequest, send_to_pod

_POLL_SECONDS = 1.0
_SECONDS = 20.0
_opener = build_opener(ProxyHandler({}))  # without a proxy: the page is on this machine

Send = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]
"""Sends a request (method, path, body) to the page of rank 0; returns status and body."""


def profile(
    job: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="Manifest, run directory or name of a job.")
    ],
    steps: Annotated[int, typer.Option(min=1, max=10, help="Number of steps to record.")] = 3,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace of the job; the job is in the cluster."),
    ] = None,
) -> None:
    """Record the next steps of a running job with torch.profiler, and print the folder.

    Rank 0 records, or the ranks in spec.observability.profile. Open the files with
    https://ui.perfetto.dev. In a cluster, the folder is a path in the pods, on the volume of the
    checkpoints; the command needs the permissions to list pods, and to get and create
    pods/portforward.
    """
    manifest = load_job(Path(job), may_resume=True) if os.path.isfile(job) else None
    is_local = manifest is None or registry.load(manifest[0].spec.backend.type).runs_without_cluster
    if namespace is None and is_local:
        work = _profile_here(run_directory(job, manifest), steps)
    else:
        name = manifest[0].metadata.name if manifest else job
        known = manifest[0].metadata.namespace if manifest else "default"
        work = _profile_in_cluster(Key(namespace or known, name), steps)
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_STOPPED) from None


async def _profile_here(run_dir: Path, steps: int) -> None:
    here = job_in(run_dir)
    url = here.nodes[0].url if here.nodes else None
    if url is None:
        raise FineTuneError(f"{run_dir} has no running job; start it with ftctl run")

    def request(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked = Request(url + path, body if method == "POST" else None, method=method)
        try:
            with _opener.open(asked, timeout=_SECONDS) as response:
                return response.status, response.read()
        except HTTPError as error:
            return error.code, error.read()
        except OSError as error:
            raise FineTuneError(f"{url} does not respond ({error})") from error

    async def send(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        return await asyncio.to_thread(request, method, path, body)

    await _record(send, steps)


async def _profile_in_cluster(key: Key, steps: int) -> None:
    async with await HttpClient.connect() as client:
        job = await get_job(client, key)
        if (backend := backend_of(job)) != KUBERNETES:
            raise FineTuneError(
                f"FineTuneJob {key} runs on backend {backend}, whose pages cannot be reached from "
                "here; set spec.observability.profile"
            )
        pod = (await pods_of(client, job)).get(0)
        if pod is None or get_in(pod, "status", "phase") != "Running":
            phase = get_in(job, "status", "phase") or "Pending"
            raise FineTuneError(
                f"FineTuneJob {key} is {phase}: the pod of rank 0 is not running; wait until the "
                "job trains"
            )
        name, port = pod["metadata"]["name"], metrics_port(job)

        async def send(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            request = PodRequest(method, path, body, seconds=_SECONDS)
            response = await send_to_pod(client, key.namespace, name, port, request)
            return response.status, response.body

        await _record(send, steps)


async def _record(send: Send, steps: int) -> None:
    """Request a profile, wait until it is written, and print its folder.

    Raises:
        FineTuneError: the request is refused, the run ends before, or the profile is lost.
    """
    before = await _progress(send)
    status, body = await send("POST", "/profile", json.dumps({"steps": steps}).encode())
    if status == HTTPStatus.NOT_FOUND:
        raise FineTuneError(
            f"this trainer cannot record a profile on request ({_message(body)}); use a newer image"
        )
    if status != HTTPStatus.ACCEPTED:
        raise FineTuneError(f"the profile is refused: {_message(body)}")
    print(f"recording {steps} steps", file=sys.stderr, flush=True)
    while not _is_new(found := get_in(now := await _poll(send), "profile"), before):
        if _start_of(now) != _start_of(before):
            raise FineTuneError("the profile is lost: the ranks were restarted; request it again")
        await asyncio.sleep(_POLL_SECONDS)
    if (error := get_in(found, "error")) is not None:
        raise FineTuneError(f"the profile is lost: {error}")
    print(get_in(found, "path"), flush=True)


async def _poll(send: Send) -> Any:
    try:
        return await _progress(send)
    except (ApiError, FineTuneError) as error:
        raise FineTuneError(
            f"the run has ended or does not respond ({error}); look for the profile in profiles/ "
            "of the run directory"
        ) from error


def _is_new(profile: Any, before: Any) -> bool:
    """Whether a profile began after the progress `before`."""
    began = count_in(profile, "firstStep")
    return began is not None and began > (count_in(before, "step") or 0)


def _start_of(progress: Any) -> tuple[int | None, int | None]:
    return count_in(progress, "attempt"), count_in(progress, "restartsInPlace")


async def _progress(send: Send) -> Any:
    """Return the progress of the run.

    Raises:
        FineTuneError: rank 0 has not reported yet, or the response is not progress.
    """
    status, body = await send("GET", "/progress", b"")
    if status != HTTPStatus.OK:
        raise FineTuneError(f"the page of rank 0 responds with {status}: {_message(body)}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise FineTuneError(f"the page of rank 0 has no readable progress ({error})") from error


def _message(body: bytes) -> str:
    """Return the message in a response of the page; its text if it has none."""
    text = body.decode(errors="replace").strip()[:1024]
    try:
        return str(get_in(json.loads(text), "message") or text)
    except ValueError:
        return text
