"""What `make images` makes of its variables, and what it says where something is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

import build_images
import engines
from engines import Build, EngineError

ROOT = Path(__file__).parents[2]


def refused(image: str = "trainer", **given: str) -> str:
    """Return why an image cannot be built with these variables."""
    with pytest.raises(EngineError) as told:
        build_images.plan_of(image, given)
    return str(told.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"WHEELS": "/no/folder"}, "WHEELS=/no/folder is no folder", id="no wheels"),
        pytest.param({"CA": "/no/ca.pem"}, "CA=/no/ca.pem is no file", id="no certificates"),
        pytest.param({"ACCELERATOR": "tpu"}, "ACCELERATOR=tpu is neither cuda nor cpu", id="a TPU"),
        pytest.param(
            {"PLATFORMS": "linux/arm64"}, "PLATFORMS is for images that are pushed", id="not pushed"
        ),
    ],
)
def test_a_variable_that_cannot_be_is_refused(given: dict[str, str], words: str) -> None:
    assert words in refused(**given)


def test_an_engine_that_is_none_is_refused() -> None:
    with pytest.raises(EngineError, match="ENGINE=kaniko is none of docker, podman, buildah"):
        engines.find("kaniko")


def test_without_an_engine_it_says_what_each_lacks_and_what_to_install(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    program = [sys.executable, str(ROOT / "operator" / "images" / "build_images.py")]
    paths = f"{tmp_path}:{ROOT / 'nothing'}"
    done = subprocess.run(program, env={"PATH": paths}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    (said,) = done.stderr.splitlines()
    assert "docker buildx inspect says: Cannot connect to the Docker daemon" in said
    assert "podman is not on the PATH; buildah is not on the PATH" in said
    assert said.endswith("on Debian: apt-get install buildah")


def test_a_cpu_build_among_the_wheels_makes_an_image_for_cpus(tmp_path: Path) -> None:
    assert build_images.trainer_arguments(None, {}) == {"ACCELERATOR": "cuda", "TORCH": ""}
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    made = build_images.trainer_arguments(tmp_path, {})
    assert made == {"ACCELERATOR": "cpu", "TORCH": "torch==2.13.0+cpu"}
    asked = build_images.trainer_arguments(tmp_path, {"ACCELERATOR": "cuda"})
    assert asked == {"ACCELERATOR": "cuda", "TORCH": ""}


def test_the_name_of_an_image_is_its_registry_and_the_version() -> None:
    version = build_images.version()
    plan = build_images.plan_of("operator", {"PUSH": "registry.example.com/team/"})
    assert plan.name == f"registry.example.com/team/finetune-operator:{version}"
    assert build_images.plan_of("operator", {}).name == f"localhost/finetune-operator:{version}"


def test_secrets_and_wheels_are_told_to_the_engine_and_are_no_arguments(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://user:secret@example.com\n")
    given = {"PIP_CONF": str(tmp_path / "pip.conf"), "WHEELS": str(tmp_path)}
    plan: Build = build_images.plan_of("operator", given)
    options = plan.options()
    assert f"id=pip,src={tmp_path / 'pip.conf'}" in options
    assert f"wheels={tmp_path}" in options
    assert plan.arguments == {}
    assert "secret@" not in " ".join(options)


def test_the_dockerfiles_name_their_base_by_digest() -> None:
    for image in ("operator", "trainer"):
        text = (ROOT / image / "Dockerfile").read_text(encoding="utf-8")
        (base,) = [line for line in text.splitlines() if line.startswith("ARG BASE=")]
        assert len(base.partition("@sha256:")[2]) == 64
