"""What `make images` left in build/images; only `make test-images` collects this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from image_runs import IMAGES, Container, built
from oci_archive import Image, opened

_BUILT = {name: built(name) for name in ("operator", "trainer")}
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where the images are not there."""
    missing = [name for name, about in _BUILT.items() if about is None]
    for item in items:
        if missing and item.path.is_relative_to(_HERE):
            reason = f"there is no image of the {missing[0]}; run: make images"
            item.add_marker(pytest.mark.skip(reason=reason))


def _about(name: str) -> dict[str, Any]:
    about = _BUILT[name]
    assert about is not None
    return about


@pytest.fixture(scope="session", params=["operator", "trainer"])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """Each image, as its archive holds it."""
    with opened(IMAGES / _about(request.param)["archive"]) as found:
        yield found


@pytest.fixture(scope="session")
def operator_image() -> Iterator[Image]:
    """The operator's image, as its archive holds it."""
    with opened(IMAGES / _about("operator")["archive"]) as found:
        yield found


@pytest.fixture(scope="session")
def operator_container() -> Iterator[Container]:
    """A container of the operator's image."""
    made = Container(_about("operator"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def trainer_container() -> Iterator[Container]:
    """A container of the trainer's image."""
    made = Container(_about("trainer"))
    yield made
    made.close()
