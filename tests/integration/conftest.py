"""What tests that start main processes share, and those that need a cluster."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.launch.launches import Launch, launch

if TYPE_CHECKING:
    from support.cluster.clusters import RunningCluster
    from support.cluster.operators import Api


@pytest.fixture
def start() -> Iterator[Callable[..., Launch]]:
    """Start main processes on stand-ins as `launch` does, and end those a failed test left."""
    launches: list[Launch] = []

    def start(*arguments: Any) -> Launch:
        launches.append(launch(*arguments))
        return launches[-1]

    yield start
    for one in launches:
        if one.process.poll() is None:
            one.process.kill()
            one.wait()


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("real", marks=pytest.mark.cluster)]
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[RunningCluster]":
    """An API server: the embedded one, and the one that FINETUNE_TEST_KUBECONFIG names."""
    from support.cluster.clusters import (  # only where a test asks for one
        RunningCluster,
        embedded_cluster,
    )
    from support.cluster.operators import KUBECONFIG

    if request.param == "embedded":
        with embedded_cluster(tmp_path_factory.mktemp("embedded")) as made:
            yield made
    elif KUBECONFIG is None:
        pytest.skip("FINETUNE_TEST_KUBECONFIG names no cluster")
    else:
        yield RunningCluster(KUBECONFIG)


@pytest.fixture(scope="module")
def api(cluster: "RunningCluster") -> "Iterator[Api]":
    """The cluster, with our kinds."""
    from support.cluster.operators import open_api

    with open_api(cluster.kubeconfig) as made:
        yield made
