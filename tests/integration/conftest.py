"""What tests that start main processes share, and those that need a cluster."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from launches import Launch, launch

if TYPE_CHECKING:
    from operators import Api


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


@pytest.fixture(scope="module")
def api() -> "Iterator[Api]":
    """The API server that FINETUNE_TEST_KUBECONFIG names, with our kinds."""
    from operators import KUBECONFIG, Api  # only where a test asks for a cluster

    assert KUBECONFIG is not None
    made = Api(KUBECONFIG)
    made.install_crds()
    yield made
    made.close()
