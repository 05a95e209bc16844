"""An API server with an etcd of its own, which a test may stop, restart and make forget.

Its two programs come from a folder as setup-envtest fills it. Controllers run only where a test
starts them, and that folder has them: else nothing collects what a deleted object owned.
"""

import json
import os
import signal
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import yaml

from finetune_operator.kube.resources import FINE_TUNE_JOBS
from support.cluster.operators import Api, wait_until
from support.telemetry.node_pages import free_ports

PROGRAMS = os.environ.get("KUBEBUILDER_ASSETS")
_TOKEN = "admin"
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
GUEST = "guest"
"""Name and token of a user without rights."""

_START_SECONDS = 60.0


class ControlPlane:
    """etcd and kube-apiserver; a context manager.

    Args:
        programs: Folder with both programs.
        folder: Where they keep what they need.
        flags: More of the API server's.

    Attributes:
        kubeconfig: Of a user who may do everything.
    """

    def __init__(self, programs: str, folder: Path, flags: Sequence[str] = ()) -> None:
        self._programs = Path(programs)
        self._flags = flags
        self._folder = folder
        self._etcd_port, self._peer_port, self._port = _free_ports(3)
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._controllers: list[subprocess.Popen[bytes]] = []
        self.kubeconfig = folder / "kubeconfig"

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._start_etcd()
            self.start_server()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._controllers:
            one.kill()
            one.wait()
        self.kill_server()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()

    def _start_etcd(self) -> None:
        etcd, peer = (f"http://127.0.0.1:{one}" for one in (self._etcd_port, self._peer_port))
        self._etcd = self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def start_server(self, *, watch_cache: bool = True) -> None:
        """Start the API server, and return when it is ready.

        Args:
            watch_cache: Without it a watch can go on only from what etcd has not compacted.
        """
        folder = self._folder
        self._server = self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--etcd-compaction-interval=0",
            f"--watch-cache={str(watch_cache).lower()}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self._port}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            f"--token-auth-file={folder / 'tokens.csv'}",
            f"--tls-cert-file={folder / 'server.crt'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'server.key'}",
            f"--service-account-signing-key-file={folder / 'server.key'}",
            *self._flags,
        )
        wait_until(self._is_ready, _START_SECONDS, f"the API server is up; see {folder}")

    @property
    def address(self) -> str:
        """URL of the API server."""
        return f"https://127.0.0.1:{self._port}"

    @property
    def certificate(self) -> bytes:
        """What verifies it, as PEM."""
        return (self._folder / "server.crt").read_bytes()

    def start_controllers(self) -> None:
        """Start Kubernetes' own controllers, and its scheduler.

        By default they send 20 and 50 requests a second, so the pods of 50 jobs would wait for the
        limit, and claims would wait for up to 15 s.
        """
        ports = _free_ports(len(CONTROLLERS))
        for program, port in zip(CONTROLLERS, ports, strict=True):
            more = ["--leader-elect=false", f"--secure-port={port}", f"--cert-dir={self._folder}"]
            more += ["--kube-api-qps=500", "--kube-api-burst=1000"]
            if program == "kube-controller-manager":
                key = self._folder / "server.key"
                more.append(f"--service-account-private-key-file={key}")
                more.append("--pvclaimbinder-sync-period=1s")
            arguments = [f"--kubeconfig={self.kubeconfig}", *more]
            self._controllers.append(self._start(program, *arguments))

    def kill_server(self) -> None:
        """Kill the API server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    @contextmanager
    def frozen_server(self) -> Iterator[None]:
        """Have the API server take connections, and answer nothing."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def stop_etcd(self, seconds: float) -> threading.Timer:
        """Let etcd hang for so long; the timer, which is started, ends that."""
        assert self._etcd is not None
        self._etcd.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, self._etcd.send_signal, [signal.SIGCONT])
        timer.start()
        return timer

    def forget_history(self, api: Api) -> None:
        """Have etcd compact all that was changed before now."""
        newest = api.run(api.client.list(FINE_TUNE_JOBS)).resource_version
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._etcd_port}/v3/kv/compaction",
            data=json.dumps({"revision": newest, "physical": True}).encode(),
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200

    def _is_ready(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, f"the API server ended; see {self._folder}"
        context = ssl.create_default_context(cafile=str(self._folder / "server.crt"))
        request = urllib.request.Request(
            f"{self.address}/readyz", headers={"Authorization": f"Bearer {_TOKEN}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [self._programs / program, *arguments], stdout=log, stderr=subprocess.STDOUT
            )

    def _write_files(self) -> None:
        key, certificate = self._folder / "server.key", self._folder / "server.crt"
        options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1"]
        names += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(["openssl", "req", *options, *names], check=True, capture_output=True)
        tokens = f"{_TOKEN},admin,admin,system:masters\n{GUEST},{GUEST},{GUEST}\n"
        (self._folder / "tokens.csv").write_text(tokens)
        server = {
            "server": self.address,
            "certificate-authority": str(certificate),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "admin",
            "clusters": [{"name": "admin", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "admin", "context": {"cluster": "admin", "user": "admin"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody else is given until a program of seconds from now binds them."""
    first = free_ports(count)
    return list(range(first, first + count))
