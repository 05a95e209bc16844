"""docker-bake.json: docker builds the images that `make images` builds and tests."""

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from build_images import IMAGES, build_options, read_target

ROOT = Path(__file__).parents[3]
BAKE: dict[str, Any] = json.loads((ROOT / "docker-bake.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LABEL = "org.opencontainers.image."
USERS = {"operator": "65532:65532", "trainer": "1000:1000"}
PROGRAMS = {
    "operator": ('ENTRYPOINT ["finetune-operator"]', "operator/requirements.lock"),
    "trainer": ('CMD ["python", "-m", "finetune_trainer"]', "trainer/requirements.lock"),
}


def dockerfile(image: str) -> str:
    text = (ROOT / BAKE["target"][image]["dockerfile"]).read_text(encoding="utf-8")
    return text.replace("\\\n", " ")


def copied(image: str) -> list[str]:
    """Return the paths that an image's Dockerfile copies from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(image), re.MULTILINE)
    return [path for line in lines for path in line.split()]


def sent_to_the_build(path: str) -> bool:
    """Whether .dockerignore lets a path into the build context."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return any(fnmatch(path, line[1:]) for line in lines if line.startswith("!"))


def test_by_default_both_images_are_built() -> None:
    assert BAKE["group"]["default"]["targets"] == list(IMAGES)
    assert {name for name in BAKE["target"] if not name.startswith("_")} == set(IMAGES)


def test_default_version_is_the_version_of_the_package() -> None:
    assert BAKE["variable"]["VERSION"]["default"] == PROJECT["version"]


def test_every_variable_is_declared() -> None:
    used = re.findall(r"\$\{(\w+)\}", json.dumps(BAKE["target"]))
    assert set(used) == set(BAKE["variable"])


@pytest.mark.parametrize("image", IMAGES)
def test_buildah_gets_the_dockerfile_arguments_and_labels_of_docker(image: str) -> None:
    target = BAKE["target"][image]
    (parent,) = target["inherits"]
    assert BAKE["target"][parent]["context"] == "."
    values = {f"${{{name}}}": one["default"] for name, one in BAKE["variable"].items()}
    labels = {**BAKE["target"][parent]["labels"], **target["labels"]}

    read = read_target(image, {})
    options = build_options(read, {})

    expected = {key: values.get(value, value) for key, value in labels.items()}
    arguments = [option for option in options if option.startswith("--build-arg")]
    assert options[options.index("--file") + 1] == str(ROOT / target["dockerfile"])
    assert arguments == [
        f"--build-arg={key}={values[value]}" for key, value in target.get("args", {}).items()
    ]
    found = dict(read["labels"])
    for key in ("revision", "created"):  # from git; a release passes them to docker by --set
        found.pop(f"{LABEL}{key}", None)
    assert found == expected


@pytest.mark.parametrize("image", IMAGES)
def test_labels_repeat_what_the_package_declares(image: str) -> None:
    labels = read_target(image, {})["labels"]
    documentation = PROJECT["urls"]["Documentation"]

    assert labels[f"{LABEL}title"] == f"finetune-{image}"
    assert labels[f"{LABEL}version"] == PROJECT["version"]
    assert labels[f"{LABEL}licenses"] == PROJECT["license"]
    assert labels[f"{LABEL}description"] == PROJECT["description"]
    assert labels[f"{LABEL}documentation"] == documentation
    assert labels[f"{LABEL}source"] == documentation.partition("/tree/")[0]


@pytest.mark.parametrize("image", IMAGES)
def test_each_build_argument_is_declared_by_the_dockerfile(image: str) -> None:
    declared = set(re.findall(r"^ARG (\w+)", dockerfile(image), re.MULTILINE))
    assert declared == {"BASE", *BAKE["target"][image].get("args", {})}


@pytest.mark.parametrize("image", IMAGES)
def test_each_copied_path_exists_and_is_sent_to_the_build(image: str) -> None:
    paths = copied(image)
    assert paths
    for path in paths:
        assert (ROOT / path).exists()
        assert sent_to_the_build(path), path


@pytest.mark.parametrize("image", IMAGES)
def test_packages_come_from_lock_files_with_hashes_only(image: str) -> None:
    text = dockerfile(image)
    locks = {path for path in copied(image) if path.endswith(".lock")}
    assert locks >= {"operator/images/tools.lock", PROGRAMS[image][1]}
    installs = re.findall(r"^RUN .*install\.py packages.*$", text, re.MULTILINE)
    assert installs
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)
    names = {Path(lock).name for lock in locks} - {"tools.lock"}
    steps = "\n".join(re.findall(r"^RUN .*$", text, re.MULTILINE))
    assert names == set(re.findall(r"[\w-]+\.lock", steps))


@pytest.mark.parametrize("image", IMAGES)
def test_user_environment_and_program(image: str) -> None:
    last = dockerfile(image).split("\nFROM ")[-1].splitlines()
    settings = [line for line in last if re.match(r"(ENV|USER|ENTRYPOINT|CMD)\b", line)]
    assert settings == [
        "ENV PATH=/opt/finetune/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp",
        f"USER {USERS[image]}",
        PROGRAMS[image][0],
    ]


@pytest.mark.parametrize("image", IMAGES)
def test_base_is_named_by_digest(image: str) -> None:
    (base,) = re.findall(r"^ARG BASE=(.+)$", dockerfile(image), re.MULTILINE)
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", base)


def test_platform_is_left_to_the_machine_or_to_the_command_line() -> None:
    """A default of two platforms would make docker's default driver refuse the build."""
    assert all("platforms" not in target for target in BAKE["target"].values())
