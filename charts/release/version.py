"""The version that is released: one for package, chart and images, with its changelog."""

import re
import tomllib
from pathlib import Path

_PLACES = {
    "charts/finetune-operator/Chart.yaml": ("version", "appVersion"),
    "operator/finetune_operator/__init__.py": ("__version__",),
    "trainer/finetune_trainer/__init__.py": ("__version__",),
}
"""Files that repeat what pyproject.toml says, and by which keys."""


class ReleaseError(Exception):
    """Nothing can be released from this; the message says why, and what to do."""


def agreed_version(root: Path) -> str:
    """Return the version that all files of a checkout name.

    Raises:
        ReleaseError: One names another.
    """
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    for place, keys in _PLACES.items():
        text = (root / place).read_text(encoding="utf-8")
        for key in keys:
            found = re.search(rf'^{key}(?::| =) "?([^"\s]+)"?$', text, re.MULTILINE)
            other = found[1] if found else "nothing"
            if other != version:
                raise ReleaseError(
                    f"{place} says {key} {other}, pyproject.toml {version}; make them the same"
                )
    return version


def check_tag(tag: str, version: str) -> None:
    """Check that a tag is the one of a version.

    Raises:
        ReleaseError: It is another version's.
    """
    if tag != f"v{version}":
        raise ReleaseError(f"TAG={tag} is not v{version}, the version in pyproject.toml")


def changelog(text: str, version: str) -> str:
    """Return what a changelog says of a version, without its heading.

    Raises:
        ReleaseError: It says nothing.
    """
    heading = rf"^## {re.escape(version)}(?: - \d{{4}}-\d\d-\d\d)?\n"
    found = re.search(rf"{heading}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    section = found[1].strip() if found else ""
    if not section:
        raise ReleaseError(
            f"CHANGELOG.md says nothing below `## {version}`; move what is below Unreleased there"
        )
    return section
