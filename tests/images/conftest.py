"""Fixtures for the images of `make images`; only `make test-images` collects this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.images.image_archive import ImageArchive, open_archive
from support.images.image_runs import IMAGES, Container, built

_BUILT = {name: built(name) for name in ("operator", "trainer")}
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests of this folder, with the reason, if an image is missing."""
    missing = [name for name, record in _BUILT.items() if record is None]
    for item in items:
        if missing and item.path.is_relative_to(_HERE):
            reason = f"the {missing[0]} image is missing; run: make images"
            item.add_marker(pytest.mark.skip(reason=reason))


def _record(name: str) -> dict[str, Any]:
    record = _BUILT[name]
    assert record is not None
    return record


@pytest.fixture(scope="session", params=["operator", "trainer"])
def image(request: pytest.FixtureRequest) -> Iterator[ImageArchive]:
    """The archive of each image."""
    with open_archive(IMAGES / _record(request.param)["archive"]) as found:
        yield found


@pytest.fixture(scope="session")
def operator_image() -> Iterator[ImageArchive]:
    """The archive of the operator's image."""
    with open_archive(IMAGES / _record("operator")["archive"]) as found:
        yield found


@pytest.fixture(scope="session")
def operator_container() -> Iterator[Container]:
    """A container of the operator's image."""
    container = Container(_record("operator"))
    yield container
    container.close()


@pytest.fixture(scope="session")
def trainer_container() -> Iterator[Container]:
    """A container of the trainer's image."""
    container = Container(_record("trainer"))
    yield container
    container.close()
