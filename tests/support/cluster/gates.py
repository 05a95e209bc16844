"""A gate between a client and the API server: a test freezes it, shuts it and opens it again.

It passes bytes on, so TLS goes through it unseen, and the server behind it stays as it is for
everybody else.
"""

import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import yaml


class Gate:
    """A TCP relay; a context manager.

    Args:
        kubeconfig: Of the cluster behind the gate.
        folder: Where the kubeconfig that leads through the gate is written.

    Attributes:
        kubeconfig: That file.
    """

    def __init__(self, kubeconfig: str, folder: Path) -> None:
        config = yaml.safe_load(Path(kubeconfig).read_text())
        (named,) = config["clusters"]
        server = urlsplit(named["cluster"]["server"])
        self._target = (server.hostname or "", server.port or 443)
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_shut = False
        self._lock = threading.Lock()  # of what is shut and what is connected
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        named["cluster"]["server"] = f"{server.scheme}://127.0.0.1:{port}{server.path}"
        named["cluster"]["tls-server-name"] = server.hostname
        self.kubeconfig = folder / "through-the-gate.yaml"
        self.kubeconfig.write_text(yaml.safe_dump(config))
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Keep connections open and let nothing through, as a server that hangs."""
        self._is_open.clear()

    def shut(self) -> None:
        """Break every connection and refuse new ones, as a server that is away."""
        with self._lock:
            self._is_shut = True
            self._break()

    def open(self) -> None:
        """Let everything through again, also what was sent while it was frozen."""
        self._is_shut = False
        self._is_open.set()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._listener.close()
        with self._lock:
            self._break()

    def _break(self) -> None:
        for one in self._connections:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended by itself
        self._connections.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_shut:
                near.close()
                continue
            far = socket.create_connection(self._target)
            with self._lock:
                if self._is_shut:  # ... since it was asked for
                    near.close()
                    far.close()
                    continue
                self._connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._is_open.wait()
                sink.sendall(data)
        except OSError:
            pass  # the other direction has broken it
        finally:
            for one in (source, sink):
                one.close()
