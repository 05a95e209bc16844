"""A release: its checks, and which artifacts it builds, pushes, joins, signs and attaches.

Fake programs record the calls of the programs that reach a registry.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_operator import __version__

ROOT = Path(__file__).parents[3]
VERSION = "0.1.0"
"""Version of the copies, whatever the version of this checkout is."""

INSTALL = 'image: "ghcr.io/finetune-operator/finetune-operator:0.1.0"\n'
FAKE_PROGRAM = """#!/bin/sh
echo "{name} $*" >> "$CALLS"
digest=$(echo "{name} $*" | sha256sum | cut -d" " -f1)
case "{name} $1 $2 $3" in
  "helm push "*) echo "Pushed: $3"; echo "Digest: sha256:$digest";;
  "helm package "*) tar cf "$4/finetune-operator-0.1.0.tgz" -C "$2" values.yaml;;
  "docker buildx imagetools inspect")
    echo "{\\"digest\\": \\"sha256:$digest\\", \\"manifests\\": []}";;
  "docker buildx bake --push")
    while [ "$1" != --metadata-file ]; do shift; done
    image="{\\"containerimage.digest\\": \\"sha256:$digest\\"}"
    echo "{\\"operator\\": $image, \\"trainer\\": $image}" > "$2";;
esac
"""
PROGRAMS = ("docker", "helm", "cosign", "gh")
COMMIT = ("-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-q", "-m", "a")


class Checkout:
    """A copy of the files of a release in a repository of its own.

    Args:
        folder: Parent of the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        for name in ("charts/release", "charts/finetune-operator"):
            shutil.copytree(ROOT / name, self.root / name)
        for name in (
            "pyproject.toml",
            "operator/finetune_operator/__init__.py",
            "trainer/finetune_trainer/__init__.py",
        ):
            self.write(name, (ROOT / name).read_text().replace(__version__, VERSION))
        chart = "charts/finetune-operator/Chart.yaml"
        self.write(chart, (ROOT / chart).read_text().replace(__version__, VERSION))
        self.write("CHANGELOG.md", "# Changelog\n\n## 0.1.0 - 2026-01-31\n\n- It trains.\n")
        self.write("charts/kustomize/install.yaml", INSTALL)
        self.git("init", "-q")
        self.git("add", "pyproject.toml")
        self.git(*COMMIT)
        self._calls = folder / "calls"
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name in PROGRAMS:
            program = self._programs / name
            program.write_text(FAKE_PROGRAM.replace("{name}", name))
            program.chmod(0o755)

    def git(self, *arguments: str) -> str:
        """Run git in the checkout and return its output."""
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def release(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a step of the release."""
        command = [sys.executable, "-m", "release", *arguments]
        environ = {
            "PATH": f"{self._programs}:/usr/bin:/bin",
            "PYTHONPATH": str(self.root / "charts"),
            "CALLS": str(self._calls),
        }
        return subprocess.run(command, cwd=self.root, env=environ, capture_output=True, text=True)

    def calls(self, of: str) -> list[str]:
        """Return the arguments of a program's calls with shortened paths and digests."""
        if not self._calls.exists():
            return []
        lines = self._calls.read_text().replace(f"{self.root}/", "").splitlines()
        short = (re.sub(r"sha256:[0-9a-f]{64}", "sha256:…", line) for line in lines)
        return [line.removeprefix(f"{of} ") for line in short if line.startswith(f"{of} ")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that was released."""
    checkout = Checkout(tmp_path_factory.mktemp("published"))
    for architecture in ("amd64", "arm64"):
        done = checkout.release("images", "v0.1.0", "example.com/org", architecture)
        assert done.returncode == 0, done.stderr
    done = checkout.release("publish", "v0.1.0", "example.com/org")
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout


def test_this_checkout_has_one_version(checkout: Checkout) -> None:
    done = checkout.release("check", "v0.1.0")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        pytest.param(
            *("charts/finetune-operator/Chart.yaml", "\nversion: 0.1.0", "\nversion: 0.2.0"),
            "charts/finetune-operator/Chart.yaml: version is 0.2.0, but pyproject.toml has 0.1.0; "
            "make them equal",
            id="the chart is of another version",
        ),
        pytest.param(
            *("CHANGELOG.md", "## 0.1.0 - 2026-01-31", "## Unreleased"),
            "CHANGELOG.md has no entries below `## 0.1.0`; move those below Unreleased there",
            id="the changelog has no such version",
        ),
        pytest.param(
            *("CHANGELOG.md", "- It trains.", ""),
            "CHANGELOG.md has no entries below `## 0.1.0`; move those below Unreleased there",
            id="the changelog is empty there",
        ),
        pytest.param(
            *("pyproject.toml", 'version = "0.1.0"', 'version = "0.3.0"'),
            "charts/finetune-operator/Chart.yaml: version is 0.1.0, but pyproject.toml has 0.3.0; "
            "make them equal",
            id="the package is of another version",
        ),
    ],
)
def test_inconsistent_versions_are_not_released(
    checkout: Checkout, file: str, old: str, new: str, message: str
) -> None:
    text = (checkout.root / file).read_text()
    assert old in text
    checkout.write(file, text.replace(old, new, 1))

    done = checkout.release("publish", "v0.1.0", "example.com/org")

    assert (done.returncode, done.stderr) == (1, f"{message}\n")
    assert checkout.calls("gh") == []


def test_a_tag_of_another_version_is_refused(checkout: Checkout) -> None:
    done = checkout.release("check", "v0.2.0")

    assert done.stderr == "TAG=v0.2.0 is not v0.1.0, the version in pyproject.toml\n"


def test_images_are_built_and_pushed_with_sbom_provenance_and_commit(published: Checkout) -> None:
    create, amd64, *_ = published.calls("docker")
    assert create == "buildx create --use --driver docker-container"
    commit = published.git("rev-parse", "HEAD")
    created = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    label = r"--set \*\.labels\.org\.opencontainers\.image"
    assert re.fullmatch(
        r"buildx bake --push --sbom=true --provenance=mode=max --set \*\.platform=linux/amd64 "
        rf"{label}\.revision={commit} {label}\.created={created} "
        r"--set operator\.tags=example\.com/org/finetune-operator:0\.1\.0-amd64 "
        r"--set trainer\.tags=example\.com/org/finetune-trainer:0\.1\.0-amd64 "
        r"--metadata-file build/release/amd64/metadata\.json operator trainer",
        amd64,
    )


def test_images_of_two_architectures_are_joined_with_their_attestations(
    published: Checkout,
) -> None:
    joined = [line for line in published.calls("docker") if "imagetools create" in line]
    assert joined == [
        f"buildx imagetools create --tag example.com/org/finetune-{name}:0.1.0 "
        f"example.com/org/finetune-{name}@sha256:… example.com/org/finetune-{name}@sha256:…"
        for name in ("operator", "trainer")
    ]


def test_images_and_chart_are_signed_with_all_their_parts(published: Checkout) -> None:
    assert published.calls("cosign") == [
        f"sign --yes --recursive example.com/org/{name}@sha256:…"
        for name in ("finetune-operator", "finetune-trainer", "charts/finetune-operator")
    ]


def test_released_chart_and_manifest_name_the_image_by_digest(
    published: Checkout,
) -> None:
    folder = published.root / "build" / "release"
    notes = (folder / "notes.md").read_text()
    (digest,) = re.findall(r"^- `example.com/org/finetune-operator@(\S+)`$", notes, re.MULTILINE)
    values = (folder / "chart" / "finetune-operator" / "values.yaml").read_text()
    assert '  repository: "example.com/org/finetune-operator"\n' in values
    assert f'  digest: "{digest}"\n' in values
    manifest = (folder / "install.yaml").read_text()
    assert manifest == f'image: "example.com/org/finetune-operator@{digest}"\n'


def test_release_has_its_section_of_the_changelog_the_chart_and_the_manifest(
    published: Checkout,
) -> None:
    [created] = published.calls("gh")
    assert created.startswith("release create v0.1.0 --verify-tag --title 0.1.0 --notes-file ")
    assert {Path(word).name for word in created.split(" ")[8:]} == {
        "finetune-operator-0.1.0.tgz",
        "install.yaml",
    }
    notes = (published.root / "build" / "release" / "notes.md").read_text()
    assert notes.startswith("- It trains.\n\n- `example.com/org/finetune-operator@sha256:")


def test_release_without_images_is_refused(checkout: Checkout) -> None:
    done = checkout.release("publish", "v0.1.0", "example.com/org")

    assert done.returncode == 1
    assert done.stderr == "no pushed.json in build/release; run: make release-images\n"


def test_a_program_that_fails_ends_the_release(checkout: Checkout) -> None:
    (checkout.root.parent / "bin" / "docker").write_text("#!/bin/sh\necho denied; exit 1\n")

    done = checkout.release("images", "v0.1.0", "example.com/org", "amd64")

    assert done.returncode == 1
    assert "denied" in done.stdout
    assert done.stderr == "docker buildx failed (exit 1); see above\n"


def test_image_names_of_an_owner_with_capitals_are_lower_case(checkout: Checkout) -> None:
    done = checkout.release("images", "v0.1.0", "ghcr.io/Some-Org", "amd64")

    assert done.returncode == 0, done.stderr
    tags = re.findall(r"\.tags=(\S+)", checkout.calls("docker")[-1])
    assert tags == [
        f"ghcr.io/some-org/finetune-{one}:0.1.0-amd64" for one in ("operator", "trainer")
    ]


def test_digests_of_an_architecture_are_stored_for_the_job_that_publishes(
    checkout: Checkout,
) -> None:
    checkout.release("images", "v0.1.0", "example.com/org", "amd64")

    folder = checkout.root / "build" / "release" / "amd64"
    pushed = json.loads((folder / "pushed.json").read_text())
    assert set(pushed) == {"operator", "trainer"}
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in pushed.values())
