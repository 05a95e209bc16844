"""Check that package, chart and changelog have the version that is released."""

import re
import tomllib
from pathlib import Path

_PLACES = {
    "charts/finetune-operator/Chart.yaml": ("version", "appVersion"),
    "operator/finetune_operator/__init__.py": ("__version__",),
    "trainer/finetune_trainer/__init__.py": ("__version__",),
}
"""Keys that repeat the version of pyproject.toml, by file."""


class ReleaseError(Exception):
    """The release is refused or has failed; the message names the reason and the remedy."""


def agreed_version(root: Path) -> str:
    """Return the version of a checkout.

    Raises:
        ReleaseError: Two files have different versions.
    """
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    for place, keys in _PLACES.items():
        text = (root / place).read_text(encoding="utf-8")
        for key in keys:
            found = re.search(rf'^{key}(?::| =) "?([^"\s]+)"?$', text, re.MULTILINE)
            other = found[1] if found else "missing"
            if other != version:
                raise ReleaseError(
                    f"{place}: {key} is {other}, but pyproject.toml has {version}; make them equal"
                )
    return version


def check_tag(tag: str, version: str) -> None:
    """Check that a tag belongs to a version.

    Raises:
        ReleaseError: The tag belongs to another version.
    """
    if tag != f"v{version}":
        raise ReleaseError(f"TAG={tag} is not v{version}, the version in pyproject.toml")


def changelog(text: str, version: str) -> str:
    """Return a changelog's section of a version, without its heading.

    Raises:
        ReleaseError: The section is missing or empty.
    """
    heading = rf"^## {re.escape(version)}(?: - \d{{4}}-\d\d-\d\d)?\n"
    found = re.search(rf"{heading}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    section = found[1].strip() if found else ""
    if not section:
        raise ReleaseError(
            f"CHANGELOG.md has no entries below `## {version}`; move those below Unreleased there"
        )
    return section
