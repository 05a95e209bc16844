"""The clusters that a test may run on: the embedded API server, and a real one.

What a test shows on the embedded one is believed because the same test passes on the real one.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.kube.resources import Object
from support.cluster.faults import FaultyApi
from support.kernel.loop_thread import loop_thread


@dataclass(frozen=True)
class RunningCluster:
    """An API server that answers.

    Attributes:
        faults: Lets requests and watches fail; None on a real one.
    """

    kubeconfig: str
    faults: FaultyApi | None = None


@contextmanager
def embedded_cluster(
    folder: Path, crds: Sequence[Object] = (), state: Path | None = None
) -> Iterator[RunningCluster]:
    """Run an embedded API server on a thread of its own, with its kubeconfig in `folder`."""
    file = folder / "kubeconfig.json"
    api = FaultyApi(crds, state=state)
    with loop_thread() as loop:
        loop.run(api.__aenter__())
        file.write_text(json.dumps(api.kubeconfig()))
        try:
            yield RunningCluster(str(file), api)
        finally:
            loop.run(api.__aexit__(None, None, None))
