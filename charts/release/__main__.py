"""Publish a version in three steps, which jobs of .github/workflows/release.yml run by make.

python -m release check TAG
python -m release images TAG REGISTRY ARCHITECTURE    (on a machine of each architecture)
python -m release publish TAG REGISTRY                (with build/release of all architectures)
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from release.registry import Pushed, join_images, push_chart, push_images, run, sign
from release.version import ReleaseError, agreed_version, changelog, check_tag

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
CHART = ROOT / "charts" / "finetune-operator"
MANIFEST = ROOT / "charts" / "kustomize" / "install.yaml"
OPERATOR = "finetune-operator"
IMAGES = ("operator", "trainer")
PUSHED = "pushed.json"
"""File of an architecture with the digests of its images."""


def main() -> int:
    """Run one step; return the exit code."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("step", choices=("check", "images", "publish"))
    parser.add_argument("tag", help="tag of the release: v and the version")
    parser.add_argument(
        "registry", nargs="?", default="", help="registry and folder, such as ghcr.io/OWNER"
    )
    parser.add_argument(
        "architecture", nargs="?", default="", help="architecture of this machine, such as amd64"
    )
    given = parser.parse_args()
    registry = given.registry.lower()  # owners on GitHub may have capitals, image names may not
    try:
        version = agreed_version(ROOT)
        check_tag(given.tag, version)
        notes = changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        if given.step == "images":
            build_images(version, registry, given.architecture)
        elif given.step == "publish":
            publish(version, registry, notes)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build_images(version: str, registry: str, architecture: str) -> None:
    """Build and push the images of this machine's architecture and store their digests."""
    folder = BUILD / "release" / architecture
    folder.mkdir(parents=True, exist_ok=True)
    tags = {one: f"{registry}/finetune-{one}:{version}-{architecture}" for one in IMAGES}
    pushed = push_images(tags, architecture, commit_labels(), folder)
    digests = {name: image.digest for name, image in pushed.items()}
    (folder / PUSHED).write_text(json.dumps(digests))


def commit_labels() -> dict[str, str]:
    """Return image labels with the commit of the checkout and its time."""
    command = ["git", "log", "-1", "--format=%H %ct"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    revision, seconds = output.split()
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(seconds)))
    start = "org.opencontainers.image."
    return {f"{start}revision": revision, f"{start}created": created}


def publish(version: str, registry: str, notes: str) -> None:
    """Join the images, push the chart that names them, sign all and create the release."""
    folder = BUILD / "release"
    found = sorted(folder.glob(f"*/{PUSHED}"))
    if not found:
        raise ReleaseError(f"no {PUSHED} in build/release; run: make release-images")
    digests = [json.loads(file.read_text()) for file in found]
    images = {
        name: join_images(
            [Pushed(f"{registry}/finetune-{name}", one[name]) for one in digests], version
        )
        for name in IMAGES
    }
    package = package_chart(images["operator"], version, folder)
    chart = push_chart(package, f"{registry}/charts")
    for pushed in (*images.values(), chart):
        sign(pushed)
    manifest = folder / "install.yaml"
    manifest.write_text(with_image(MANIFEST.read_text(encoding="utf-8"), images["operator"]))
    text = folder / "notes.md"
    text.write_text(f"{notes}\n\n{_digests([*images.values(), chart])}", encoding="utf-8")
    options = ("--verify-tag", "--title", version, "--notes-file", str(text))
    run("gh", "release", "create", f"v{version}", *options, str(package), str(manifest))


def package_chart(image: Pushed, version: str, folder: Path) -> Path:
    """Package the chart with the image in its values; return the path of the package."""
    copy = folder / "chart" / CHART.name
    shutil.copytree(CHART, copy, dirs_exist_ok=True)
    values = copy / "values.yaml"
    values.write_text(with_values(values.read_text(encoding="utf-8"), image), encoding="utf-8")
    run("helm", "package", str(copy), "--destination", str(folder))
    return folder / f"{CHART.name}-{version}.tgz"


def with_values(text: str, image: Pushed) -> str:
    """Return the chart's values with an image.

    Raises:
        ReleaseError: The values have no key for its repository or digest.
    """
    for key, value in (("repository", image.name), ("digest", image.digest)):
        text, count = re.subn(rf"^(  {key}: ).*$", rf'\g<1>"{value}"', text, count=1, flags=re.M)
        if not count:
            raise ReleaseError(f"values.yaml: image.{key} is missing; restore it")
    return text


def with_image(manifest: str, image: Pushed) -> str:
    """Return the install manifest with an image.

    Raises:
        ReleaseError: The manifest names no image of the operator.
    """
    text, count = re.subn(rf'image: "?\S+/{OPERATOR}:[\w.-]+"?', f'image: "{image}"', manifest)
    if not count:
        raise ReleaseError(f"{MANIFEST.name} names no image of the operator; run: make crd")
    return text


def _digests(all_pushed: list[Pushed]) -> str:
    return "".join(f"- `{pushed}`\n" for pushed in all_pushed)


if __name__ == "__main__":
    sys.exit(main())
