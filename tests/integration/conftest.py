"""What tests that need a cluster share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from operators import Api


@pytest.fixture(scope="module")
def api() -> "Iterator[Api]":
    """The API server that FINETUNE_TEST_KUBECONFIG names, with our kinds."""
    from operators import KUBECONFIG, Api  # only where a test asks for a cluster

    assert KUBECONFIG is not None
    made = Api(KUBECONFIG)
    made.install_crds()
    yield made
    made.close()
