"""Settings of `make images`: buildah's options, and invalid settings, which are refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import build_images
from build_images import BuildError, build_options, read_target

ROOT = Path(__file__).parents[3]
RUN = """
import os, sys
from pathlib import Path
import build_images
sys.exit(build_images.main(sys.argv[2:], os.environ, Path(sys.argv[1])))
"""


def run_builder(*arguments: str, path: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run the builder with the programs of one folder only; the folder also receives the images."""
    environ |= {"PATH": str(path), "PYTHONPATH": str(ROOT / "operator" / "images")}
    command = [sys.executable, "-c", RUN, str(path), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def write_program(folder: Path, name: str, script: str) -> None:
    """Write a program."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param({"WHEELS": "/no/folder"}, "WHEELS=/no/folder: folder not found", id="wheels"),
        pytest.param({"CA": "/no/ca.pem"}, "CA=/no/ca.pem: file not found", id="certificates"),
        pytest.param(
            {"ACCELERATOR": "tpu"}, "ACCELERATOR=tpu is unknown; use cuda or cpu", id="accelerator"
        ),
    ],
)
def test_invalid_setting_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(BuildError) as refused:
        build_options(read_target("trainer", environ), environ)

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        pytest.param(
            {"PUSH": "registry.example.com/team"},
            [],
            "PUSH=registry.example.com/team: push with `docker buildx bake --push`, or with "
            "`buildah push` after make images",
            id="push",
        ),
        pytest.param(
            {"ENGINE": "docker"},
            [],
            "ENGINE=docker: make images builds with buildah; build with docker by: "
            "docker buildx bake",
            id="engine",
        ),
        pytest.param(
            {}, ["kaniko"], "unknown image kaniko; use operator or trainer", id="unknown image"
        ),
        pytest.param(
            {},
            [],
            "buildah is not on the PATH; install it (on Debian: apt-get install buildah), "
            "or build with docker: docker buildx bake",
            id="no buildah",
        ),
    ],
)
def test_refusal_is_one_sentence(
    tmp_path: Path, environ: dict[str, str], arguments: list[str], message: str
) -> None:
    done = run_builder(*arguments, path=tmp_path, **environ)

    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{message}\n")


def test_without_registry_and_mmdebstrap_the_message_names_both_remedies(tmp_path: Path) -> None:
    write_program(tmp_path, "buildah", "exit 125")

    done = run_builder("operator", path=tmp_path)

    assert done.returncode == 1
    assert done.stderr == (
        "the Dockerfile's base cannot be pulled, and mmdebstrap is not on the PATH to create a "
        "base; run: apt-get install mmdebstrap, or name a local image: make images BASE=…\n"
    )


def test_failed_build_names_the_program_and_its_exit_code(tmp_path: Path) -> None:
    write_program(tmp_path, "buildah", "echo no space left >&2; exit 125")

    done = run_builder("operator", path=tmp_path, BASE="localhost/base")

    assert done.returncode == 1
    assert done.stderr == "no space left\nbuildah build failed (exit 125); see above\n"


def test_cpu_wheel_of_torch_selects_a_cpu_image(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()

    assert read_target("trainer", {})["args"] == {"ACCELERATOR": "cuda", "TORCH": ""}
    given = {"WHEELS": str(tmp_path)}
    cpu = {"ACCELERATOR": "cpu", "TORCH": "torch==2.13.0+cpu"}
    assert read_target("trainer", given)["args"] == cpu
    cuda = {"ACCELERATOR": "cuda", "TORCH": ""}
    assert read_target("trainer", {**given, "ACCELERATOR": "cuda"})["args"] == cuda


def test_image_name_has_the_registry_and_the_version() -> None:
    target = read_target("operator", {"REGISTRY": "registry.example.com/team", "VERSION": "7.1"})

    assert target["tags"] == ["registry.example.com/team/finetune-operator:7.1"]
    assert target["labels"]["org.opencontainers.image.version"] == "7.1"


def test_variable_with_a_quote_stays_one_string() -> None:
    target = read_target("trainer", {"TORCH": 'torch"; \\'})

    assert target["args"]["TORCH"] == 'torch"; \\'


def test_secrets_and_wheels_are_options_but_not_build_arguments(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://user:secret@example.com\n")
    environ = {"PIP_CONF": str(tmp_path / "pip.conf"), "WHEELS": str(tmp_path)}

    target = read_target("operator", environ)
    options = build_options(target, environ)

    assert f"id=pip,src={tmp_path / 'pip.conf'}" in options
    assert f"wheels={tmp_path}" in options
    assert target["args"] == {}
    assert "secret@" not in " ".join(options)


def test_labels_name_the_commit_and_its_time() -> None:
    start = "org.opencontainers.image."
    labels = build_images.commit_labels()

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert labels[f"{start}revision"].removesuffix("-changed") == commit
    assert labels[f"{start}created"].endswith("Z")


def test_images_json_retains_the_record_of_an_image_that_was_not_rebuilt(tmp_path: Path) -> None:
    write_program(
        tmp_path,
        "buildah",
        'case $1 in push) f=${4#docker-archive:}; : > "${f%%:*}";; inspect) echo 1234;; esac',
    )
    for name in ("operator", "trainer"):
        done = run_builder(name, path=tmp_path, BASE="localhost/base", ACCELERATOR="cpu")
        assert done.returncode == 0, done.stderr

    records = json.loads((tmp_path / "images.json").read_text())
    assert {name: record["id"] for name, record in records.items()} == {
        "operator": "1234",
        "trainer": "1234",
    }
    assert records["trainer"]["environ"] == {"BASE": "localhost/base", "ACCELERATOR": "cpu"}
