"""Publish a version, in three steps that jobs of .github/workflows/release.yml call by make.

python -m release check TAG
python -m release images TAG REGISTRY ARCHITECTURE    (after `make images`, on each architecture)
python -m release publish TAG REGISTRY                (with build/release of all architectures)
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from release.registry import Pushed, attest, join_images, push_chart, push_image, run, sign
from release.version import ReleaseError, agreed_version, changelog, check_tag

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
CHART = ROOT / "charts" / "finetune-operator"
MANIFEST = ROOT / "charts" / "kustomize" / "install.yaml"
OPERATOR = "finetune-operator"
IMAGES = (OPERATOR, "finetune-trainer")
PUSHED = "pushed.json"
"""In the folder of an architecture: the digests of its images, beside their SBOMs."""


def main() -> int:
    """Do one step; return its exit code."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("step", choices=("check", "images", "publish"))
    parser.add_argument("tag", help="the tag that is released, v and the version")
    parser.add_argument("registry", nargs="?", default="", help="such as ghcr.io/OWNER")
    parser.add_argument("architecture", nargs="?", default="", help="such as amd64")
    given = parser.parse_args()
    registry = given.registry.lower()  # names of images are; those of owners on GitHub need not be
    try:
        version = agreed_version(ROOT)
        check_tag(given.tag, version)
        notes = changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        if given.step == "images":
            push_images(version, registry, given.architecture)
        elif given.step == "publish":
            publish(version, registry, notes)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def push_images(version: str, registry: str, architecture: str) -> None:
    """Push the images that were built here, and keep their digests and SBOMs for `publish`."""
    folder = BUILD / "release" / architecture
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name in IMAGES:
        archive = BUILD / "images" / f"{name}.tar"
        pushed = push_image(archive, f"{registry}/{name}", f"{version}-{architecture}")
        digests[name] = pushed.digest
        shutil.copy(BUILD / "images" / f"{name}.cdx.json", folder)
    (folder / PUSHED).write_text(json.dumps(digests))


def publish(version: str, registry: str, notes: str) -> None:
    """Join the images, push the chart that names them, sign all, and make the release."""
    folder = BUILD / "release"
    found = sorted(folder.glob(f"*/{PUSHED}"))
    if not found:
        raise ReleaseError(f"no {PUSHED} in build/release; run: make release-images")
    shipped, images = [], {}
    for name in IMAGES:
        parts = {
            where.parent.name: Pushed(f"{registry}/{name}", json.loads(where.read_text())[name])
            for where in found
        }
        images[name] = join_images([*parts.values()], version, folder)
        for architecture, part in parts.items():
            sbom = folder / f"{name}-{architecture}.cdx.json"
            shutil.copy(folder / architecture / f"{name}.cdx.json", sbom)
            attest(part, sbom)
            shipped.append(sbom)
    package = package_chart(images[OPERATOR], version, folder)
    chart = push_chart(package, f"{registry}/charts")
    for pushed in (*images.values(), chart):
        sign(pushed)
    manifest = folder / "install.yaml"
    manifest.write_text(with_image(MANIFEST.read_text(encoding="utf-8"), images[OPERATOR]))
    shipped += [package, manifest]
    text = folder / "notes.md"
    text.write_text(f"{notes}\n\n{_digests([*images.values(), chart])}", encoding="utf-8")
    told = ("--verify-tag", "--title", version, "--notes-file", str(text))
    run("gh", "release", "create", f"v{version}", *told, *map(str, shipped))


def package_chart(image: Pushed, version: str, folder: Path) -> Path:
    """Package the chart with the image in its values; return where the package is."""
    copy = folder / "chart" / CHART.name
    shutil.copytree(CHART, copy, dirs_exist_ok=True)
    values = copy / "values.yaml"
    values.write_text(with_values(values.read_text(encoding="utf-8"), image), encoding="utf-8")
    run("helm", "package", str(copy), "--destination", str(folder))
    return folder / f"{CHART.name}-{version}.tgz"


def with_values(text: str, image: Pushed) -> str:
    """Return values of the chart that name an image.

    Raises:
        ReleaseError: The text has no empty place for it.
    """
    for key, value in (("repository", image.name), ("digest", image.digest)):
        text, count = re.subn(rf"^(  {key}: ).*$", rf'\g<1>"{value}"', text, count=1, flags=re.M)
        if not count:
            raise ReleaseError(f"values.yaml has no image.{key}")
    return text


def with_image(manifest: str, image: Pushed) -> str:
    """Return the install manifest with that image.

    Raises:
        ReleaseError: It names no image of the operator.
    """
    text, count = re.subn(rf'image: "?\S+/{OPERATOR}:[\w.-]+"?', f'image: "{image}"', manifest)
    if not count:
        raise ReleaseError(f"{MANIFEST.name} names no image of the operator; run: make crd")
    return text


def _digests(all_pushed: list[Pushed]) -> str:
    return "".join(f"- `{pushed}`\n" for pushed in all_pushed)


if __name__ == "__main__":
    sys.exit(main())
