"""Two network namespaces with a link between them whose rate a test sets.

Each also has a link to this machine's own namespace, for whoever scrapes a page there. Needs root.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

needs_networks = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root, and the programs ip and tc",
)
LINK = "between"
"""Name of the link between the two, on both sides."""


@dataclass(frozen=True)
class Network:
    """One of the two.

    Attributes:
        address: by which the other namespace finds it.
        outside: by which this machine's own namespace does.
    """

    name: str
    address: str
    outside: str

    @property
    def run_by(self) -> tuple[str, ...]:
        """The start of a command that runs here."""
        return ("ip", "netns", "exec", self.name)

    def limit(self, rate: str) -> None:
        """Let no more than that leave over the link, such as `50mbit`."""
        shape = f"tbf rate {rate} burst 64kb latency 500ms"
        _run(f"{' '.join(self.run_by)} tc qdisc replace dev {LINK} root {shape}")


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Make them, and remove them at the end; no other address of this machine is touched."""
    word, third = secrets.token_hex(3), secrets.randbelow(200) + 20
    first, second = (
        Network(f"ft-{word}-{n}", f"10.213.{third}.{n + 1}", f"10.214.{third}.{4 * n + 2}")
        for n in (0, 1)
    )
    with ExitStack() as stack:
        for number, one in enumerate((first, second)):
            _run(f"ip netns add {one.name}")
            stack.callback(_run, f"ip netns delete {one.name}")  # and with it its links
            here = f"ft{word}{number}"
            _run(f"ip link add {here} type veth peer name outside netns {one.name}")
            _run(f"ip address add 10.214.{third}.{4 * number + 1}/30 dev {here}")
            _run(f"ip link set {here} up")
            _run(f"ip -n {one.name} address add {one.outside}/30 dev outside")
            _run(f"ip -n {one.name} link set outside up")
            _run(f"ip -n {one.name} link set lo up")
        _run(f"ip -n {first.name} link add {LINK} type veth peer name {LINK} netns {second.name}")
        for one in (first, second):
            _run(f"ip -n {one.name} address add {one.address}/24 dev {LINK}")
            _run(f"ip -n {one.name} link set {LINK} up")
        yield first, second


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
