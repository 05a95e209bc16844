"""The operator as a process beside a real API server, and what a test does to both."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from finetune_operator.api.v1alpha1 import FineTuneProfileSpec
from finetune_operator.kube.api_errors import AlreadyExistsError, ConflictError, NotFoundError
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    EVENTS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    NAMESPACES,
    Object,
    Resource,
)
from support.api.builders import manifest

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
KUBECONFIG = os.environ.get("FINETUNE_TEST_KUBECONFIG")


def wait_until(check: Callable[[], T | None], seconds: float, what: str = "") -> T:
    """Return the first answer that is true.

    Raises:
        AssertionError: there was none in time.
    """
    end = time.monotonic() + seconds
    while not (answer := check()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what or check}")
        time.sleep(0.02)
    return answer


class Api:
    """The API server in plain calls; the client's own coroutines, one at a time."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        self._runner = asyncio.Runner()
        self.client = self.run(HttpClient.connect(kubeconfig))
        self.run(self.client.__aenter__())

    def close(self) -> None:
        self.run(self.client.__aexit__(None, None, None))
        self._runner.close()

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(what)

    def install_crds(self) -> None:
        """Create or update our kinds, and wait until they are served."""
        for file in sorted((ROOT / "crds").glob("*.yaml")):
            made = yaml.safe_load(file.read_text())
            wait_until(partial(self._put, made), 20, file.name)
        wait_until(lambda: self.serves(FINE_TUNE_JOBS) and self.serves(FINE_TUNE_PROFILES), 20)

    def _put(self, definition: Object) -> bool:
        """Create or update it; False if somebody has changed it meanwhile.

        Its controllers do, and other tests that begin on the same cluster.
        """
        try:
            self.run(self.client.create(CRDS, definition))
        except AlreadyExistsError:
            there = self.run(self.client.get(CRDS, definition["metadata"]["name"]))
            version = {"resourceVersion": there["metadata"]["resourceVersion"]}
            replaced = {**definition, "metadata": {**definition["metadata"], **version}}
            try:
                self.run(self.client.replace(CRDS, replaced))
            except ConflictError:
                return False
        return True

    def serves(self, resource: Resource) -> bool:
        """Say whether the API server knows the kind."""
        try:
            self.run(self.client.list(resource))
        except NotFoundError:
            return False
        return True

    @contextmanager
    def namespace(self, start: str) -> Iterator[str]:
        made = {"metadata": {"generateName": f"{start}-"}}
        name = self.run(self.client.create(NAMESPACES, made))["metadata"]["name"]
        try:
            yield name
        finally:
            self.run(self.client.delete(NAMESPACES, name))

    def apply(
        self,
        namespace: str,
        name: str = "tiny",
        labels: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Object:
        """Create a job of the backend `configmap`, changed in `overrides` as `manifest` does."""
        fields: dict[str, Any] = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        fields |= {"backend": {"type": "configmap"}, **overrides}
        made = manifest(name=name, **fields)
        made["metadata"].pop("namespace")
        made["metadata"]["labels"] = dict(labels or {})
        return self.run(self.client.create(FINE_TUNE_JOBS, made, namespace))

    @contextmanager
    def profile(self, name: str, spec: FineTuneProfileSpec) -> Iterator[None]:
        """Have a FineTuneProfile."""
        kind = {"apiVersion": FINE_TUNE_PROFILES.api_version, "kind": FINE_TUNE_PROFILES.kind}
        said = spec.model_dump(by_alias=True, exclude_none=True, mode="json")
        made = {**kind, "metadata": {"name": name}, "spec": said}
        self.run(self.client.create(FINE_TUNE_PROFILES, made))
        try:
            yield
        finally:
            self.run(self.client.delete(FINE_TUNE_PROFILES, name))

    def job(self, namespace: str, name: str = "tiny") -> Object | None:
        return self.get(FINE_TUNE_JOBS, namespace, name)

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        try:
            return self.run(self.client.get(resource, name, namespace))
        except NotFoundError:
            return None

    def change(self, namespace: str, name: str = "tiny", **spec: Any) -> None:
        self.run(self.client.patch(FINE_TUNE_JOBS, name, namespace, {"spec": spec}))

    def delete(self, namespace: str, name: str = "tiny") -> None:
        self.run(self.client.delete(FINE_TUNE_JOBS, name, namespace))

    def play(self, namespace: str, attempt: str, **data: str) -> None:
        """Write into the ConfigMap of an attempt what became of it."""
        self.run(self.client.patch(CONFIG_MAPS, attempt, namespace, {"data": data}))

    def attempts(self, namespace: str) -> list[str]:
        """Return the names of all ConfigMaps that are attempts."""
        listing = self.run(
            self.client.list(CONFIG_MAPS, namespace, label_selector="finetune.dev/job-uid")
        )
        return sorted(one["metadata"]["name"] for one in listing.items)

    def events(self, namespace: str, name: str = "tiny") -> list[str]:
        listing = self.run(self.client.list(EVENTS, namespace))
        ours = [one for one in listing.items if one["involvedObject"]["name"] == name]
        return sorted(one["reason"] for one in ours)

    def phase(self, namespace: str, name: str = "tiny") -> str:
        return phase_of(self.job(namespace, name))


@contextmanager
def open_api(kubeconfig: str) -> Iterator[Api]:
    """Connect to an API server and give it our kinds."""
    made = Api(kubeconfig)
    try:
        made.install_crds()
        yield made
    finally:
        made.close()


def phase_of(made: Object | None) -> str:
    return str(made["status"]["phase"]) if made else "gone"


def condition(made: Object | None, kind: str) -> Object:
    found = made["status"]["conditions"] if made else ()
    return next((one for one in found if one["type"] == kind), {"status": "absent", "message": ""})


_STACKS = {"PYTHONFAULTHANDLER": "1"}


class OperatorProcess:
    """One replica, as its own process.

    Args:
        kubeconfig: Its cluster.
        namespace: The one it serves, and that of its Lease.
        identity: Its name.
        source: Where its code is, if not in this checkout.
        run_by: Command that runs it, given as its last arguments.
        environ: Variables besides those of this process and its settings.
        settings: Further settings.
    """

    def __init__(
        self,
        kubeconfig: str | Path,
        namespace: str,
        identity: str = "one",
        *,
        source: Path | None = None,
        run_by: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        given = {
            "kubeconfig": kubeconfig,
            "namespaces": namespace,
            "lease_namespace": namespace,
            "identity": identity,
            "backends": "configmap=support.kernel.configmap_backend:ConfigMapBackend,"
            "fake=support.kernel.fake_backend:FakeBackend",
            "health_host": "127.0.0.1",
            "health_port": 0,
            "log_format": "json",
            **settings,
        }
        variables = {f"FINETUNE_OPERATOR_{key.upper()}": str(one) for key, one in given.items()}
        folders = (source, ROOT / "tests", ROOT / "examples" / "plugin" / "src")
        path = os.pathsep.join(str(one) for one in folders if one)
        self._lines: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [*run_by, sys.executable, "-m", "finetune_operator.kernel"],
            env={**os.environ, **(environ or {}), **variables, "PYTHONPATH": path, **_STACKS},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of its log so far."""
        return list(self._lines)

    def said(self, message: str) -> list[dict[str, Any]]:
        """Return the log lines with that message."""
        return [line for line in self._lines if line["message"] == message]

    def wait_for(self, message: str, seconds: float = 30.0) -> dict[str, Any]:
        def look() -> list[dict[str, Any]]:
            assert self.is_running, self._lines
            return self.said(message)

        return wait_until(look, seconds, f"{message} in {self._lines}")[-1]

    def health(self, page: str = "readyz") -> dict[str, Any]:
        port = self.wait_for("started")["health_port"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5) as answer:
                return {"code": answer.status, **json.load(answer)}
        except urllib.error.HTTPError as error:
            with error:
                return {"code": error.code, **json.load(error)}

    def calls(self, *verbs: str) -> dict[str, int]:
        """Return the requests so far of these verbs, Leases and questions about rights apart."""
        counts = self.health()["calls"].items()
        return {
            kind: count
            for kind, count in counts
            if kind.split()[0] in verbs
            and not any(one in kind for one in ("leases", "selfsubject"))
        }

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self.end(None)

    def end(self, number: signal.Signals | None = signal.SIGTERM) -> int:
        """Ask it to end, wait, and return its exit code; one that does not end says where it is."""
        if number is not None and self.is_running:
            self._process.send_signal(number)
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired as error:
            self._process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
            self._process.wait(20)
            self._reader.join(5)
            said = "\n".join(str(line["message"]).rstrip() for line in self._lines[-200:])
            raise AssertionError(f"the operator did not end:\n{said}") from error
        finally:
            self._reader.join(5)
            if self._process.stderr is not None:
                self._process.stderr.close()

    def __enter__(self) -> "OperatorProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.end()
        else:
            self.end(None)
