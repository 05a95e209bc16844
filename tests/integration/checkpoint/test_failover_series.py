"""Three cases of the failover series; `make failover-series` runs any number."""

from collections.abc import Iterator

import pytest

from support.launch.failover_series import Case, Series, two_mounts
from support.launch.whole_attempts import start_forked

CASES = (
    Case(1, "fuse", "fsdp", "saving@4:rank=0", wakes_in_training=True),
    Case(2, "disk", "ddp", "storing-tokens@0"),
    Case(3, "fuse", "ddp", "restoring:rank=0"),
)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Series]:
    root = tmp_path_factory.mktemp("series")
    with two_mounts(root / "layer") as layer:
        # The attempts wait for 2 s; a busy machine may be slower.
        yield Series(root, layer, start=start_forked, patience_seconds=20)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_attempt_that_was_frozen_wakes_and_the_next_attempt_is_not_disturbed(
    series: Series, case: Case
) -> None:
    assert series.run(case).wrong == []
