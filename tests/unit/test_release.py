"""A release: what may be released, and what is pushed, joined, signed and shipped for it.

The programs that reach a registry are stand-ins here, which write down how they were called.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = 'image: "ghcr.io/finetune-operator/finetune-operator:0.1.0"\n'
STAND_IN = """#!/bin/sh
echo "{name} $*" >> "$CALLS"
digest=$(echo "{name} $*" | sed "s/-[0-9]* docker:/ docker:/" | sha256sum | cut -d" " -f1)
case "{name} $1" in
  "helm push") echo "Pushed: $3"; echo "Digest: sha256:$digest";;
  "helm package") tar cf "$4/finetune-operator-0.1.0.tgz" -C "$2" values.yaml;;
esac
while [ $# -gt 0 ]; do
  [ "$1" = --digestfile ] && echo "sha256:$digest" > "$2"
  shift
done
"""
PROGRAMS = ("skopeo", "buildah", "helm", "cosign", "gh")


class Checkout:
    """What a release is made of, in a folder of its own.

    Args:
        folder: Where it is.
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
            self.write(name, (ROOT / name).read_text())
        self.write("CHANGELOG.md", "# Changelog\n\n## 0.1.0 - 2026-01-31\n\n- It trains.\n")
        self.write("charts/kustomize/install.yaml", INSTALL)
        for name in ("finetune-operator", "finetune-trainer"):
            self.write(f"build/images/{name}.tar", "")
            self.write(f"build/images/{name}.cdx.json", "{}")
        self._calls = folder / "calls"
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name in PROGRAMS:
            program = self._programs / name
            program.write_text(STAND_IN.replace("{name}", name))
            program.chmod(0o755)

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
        """Return how a program was called, with the checkout and digests shortened."""
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


def test_this_checkout_names_one_version_everywhere(checkout: Checkout) -> None:
    done = checkout.release("check", "v0.1.0")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        pytest.param(
            *("charts/finetune-operator/Chart.yaml", "\nversion: 0.1.0", "\nversion: 0.2.0"),
            "charts/finetune-operator/Chart.yaml says version 0.2.0, pyproject.toml 0.1.0; "
            "make them the same",
            id="the chart is of another version",
        ),
        pytest.param(
            *("CHANGELOG.md", "## 0.1.0 - 2026-01-31", "## Unreleased"),
            "CHANGELOG.md says nothing below `## 0.1.0`; move what is below Unreleased there",
            id="the changelog has no such version",
        ),
        pytest.param(
            *("CHANGELOG.md", "- It trains.", ""),
            "CHANGELOG.md says nothing below `## 0.1.0`; move what is below Unreleased there",
            id="the changelog is empty there",
        ),
        pytest.param(
            *("pyproject.toml", 'version = "0.1.0"', 'version = "0.3.0"'),
            "charts/finetune-operator/Chart.yaml says version 0.1.0, pyproject.toml 0.3.0; "
            "make them the same",
            id="the package is of another version",
        ),
    ],
)
def test_what_does_not_fit_together_is_not_released(
    checkout: Checkout, file: str, old: str, new: str, said: str
) -> None:
    text = (checkout.root / file).read_text()
    assert old in text
    checkout.write(file, text.replace(old, new, 1))

    done = checkout.release("publish", "v0.1.0", "example.com/org")

    assert (done.returncode, done.stderr) == (1, f"{said}\n")
    assert checkout.calls("gh") == []


def test_a_tag_of_another_version_is_refused(checkout: Checkout) -> None:
    done = checkout.release("check", "v0.2.0")

    assert done.stderr == "TAG=v0.2.0 is not v0.1.0, the version in pyproject.toml\n"


def test_images_of_two_architectures_become_one(published: Checkout) -> None:
    copied = [line.split(" ")[-1] for line in published.calls("skopeo")]
    assert copied == [
        f"docker://example.com/org/finetune-{name}:0.1.0-{architecture}"
        for architecture in ("amd64", "arm64")
        for name in ("operator", "trainer")
    ]
    joined = [line.split(" ")[-1] for line in published.calls("buildah") if "push" in line]
    assert joined == [
        "docker://example.com/org/finetune-operator:0.1.0",
        "docker://example.com/org/finetune-trainer:0.1.0",
    ]


def test_images_and_chart_are_signed_and_each_image_says_what_it_is_made_of(
    published: Checkout,
) -> None:
    signed = [line for line in published.calls("cosign") if line.startswith("sign")]
    attested = [line for line in published.calls("cosign") if line.startswith("attest")]
    assert [line.split(" ")[-1] for line in signed] == [
        "example.com/org/finetune-operator@sha256:…",
        "example.com/org/finetune-trainer@sha256:…",
        "example.com/org/charts/finetune-operator@sha256:…",
    ]
    assert len(attested) == 4
    assert all("--type cyclonedx --predicate build/release/finetune-" in line for line in attested)


def test_chart_and_manifest_that_are_shipped_name_the_image_by_its_digest(
    published: Checkout,
) -> None:
    folder = published.root / "build" / "release"
    [digest] = (one.read_text().strip() for one in folder.glob("finetune-operator-0.1.0-*.digest"))
    values = (folder / "chart" / "finetune-operator" / "values.yaml").read_text()
    assert '  repository: "example.com/org/finetune-operator"\n' in values
    assert f'  digest: "{digest}"\n' in values
    manifest = (folder / "install.yaml").read_text()
    assert manifest == f'image: "example.com/org/finetune-operator@{digest}"\n'


def test_the_release_has_its_part_of_the_changelog_and_all_files(published: Checkout) -> None:
    [created] = published.calls("gh")
    assert created.startswith("release create v0.1.0 --verify-tag --title 0.1.0 --notes-file ")
    assert {Path(word).name for word in created.split(" ")[8:]} == {
        *(
            f"finetune-{one}-{arch}.cdx.json"
            for one in ("operator", "trainer")
            for arch in ("amd64", "arm64")
        ),
        "finetune-operator-0.1.0.tgz",
        "install.yaml",
    }
    notes = (published.root / "build" / "release" / "notes.md").read_text()
    assert notes.startswith("- It trains.\n\n- `example.com/org/finetune-operator@sha256:")


def test_nothing_is_published_before_the_images(checkout: Checkout) -> None:
    done = checkout.release("publish", "v0.1.0", "example.com/org")

    assert done.returncode == 1
    assert done.stderr == "no pushed.json in build/release; run: make release-images\n"


def test_a_program_that_fails_ends_the_release(checkout: Checkout) -> None:
    (checkout.root.parent / "bin" / "skopeo").write_text("#!/bin/sh\necho denied; exit 1\n")

    done = checkout.release("images", "v0.1.0", "example.com/org", "amd64")

    assert done.returncode == 1
    assert "denied" in done.stdout
    assert done.stderr == "skopeo copy ended with 1; see above\n"


def test_an_owner_with_capitals_has_images_without(checkout: Checkout) -> None:
    done = checkout.release("images", "v0.1.0", "ghcr.io/Some-Org", "amd64")

    assert done.returncode == 0, done.stderr
    targets = [call.rpartition("docker://")[2] for call in checkout.calls("skopeo")]
    assert targets == [
        f"ghcr.io/some-org/finetune-{one}:0.1.0-amd64" for one in ("operator", "trainer")
    ]


def test_the_digests_of_an_architecture_are_kept_for_the_job_that_publishes(
    checkout: Checkout,
) -> None:
    checkout.release("images", "v0.1.0", "example.com/org", "amd64")

    folder = checkout.root / "build" / "release" / "amd64"
    assert {one.name for one in folder.iterdir()} == {
        *("pushed.json", "finetune-operator.cdx.json", "finetune-trainer.cdx.json")
    }
    pushed = json.loads((folder / "pushed.json").read_text())
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in pushed.values())
