"""What is in the images, and what is not; the list of packages beside each tells the same."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import build_images
from engines import Engine
from image_runs import IMAGES, Container, built
from oci_archive import Image, opened
from sbom import document

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where the build compiles: our environment, and the standard library but for what nothing imports.
OF_THE_BUILD = re.compile(
    r"^opt/finetune/|/lib/python3\.\d+/(?!(site|dist)-packages/|"
    r"(ensurepip|idlelib|lib2to3|pydoc_data|test|turtledemo)/)"
)
OURS = re.compile(r"site-packages/finetune_(operator|trainer)\b")


def packages(image: Image) -> dict[str, str]:
    """Return the versions of Python's packages, by name."""
    found = re.compile(r"site-packages/([^/]+)-([^/]+)\.dist-info/METADATA$")
    parts = (found.search(path) for path in image.files())
    return {one[1].replace("_", "-").lower(): one[2] for one in parts if one}


def locked(*names: str) -> dict[str, str]:
    """Return the versions that these locks name for every platform."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", text, flags=re.MULTILINE))


def test_it_runs_as_a_user_by_number_with_python_on_its_path(image: Image) -> None:
    user, _, group = image.config["User"].partition(":")
    assert user.isdigit()
    assert group.isdigit()
    assert int(user) > 0
    (path,) = (one for one in image.config["Env"] if one.startswith("PATH="))
    first = path.removeprefix("PATH=").split(":")[0].strip("/")
    assert f"{first}/python" in image.files()


def test_its_labels_say_what_it_is(image: Image) -> None:
    start = "org.opencontainers.image."
    labels = {
        name.removeprefix(start): value
        for name, value in image.config["Labels"].items()
        if name.startswith(start)
    }
    assert labels["version"] == PROJECT["version"]
    assert labels["title"] == image.name.rpartition("/")[2].partition(":")[0]
    assert labels["licenses"] == PROJECT["license"]
    assert labels["source"].startswith("https://")


def test_it_has_neither_pip_nor_what_only_the_build_saw(image: Image) -> None:
    files = image.files()
    assert not [path for path in files if re.search(r"/pip-[^/]*(dist-info|\.whl)|/pip/", path)]
    assert not {"tools", "wheels", "src", "layer", "built"} & {path.split("/")[0] for path in files}
    assert not [path for path in files if path.endswith(("pip.conf", "99build", "/ca.pem"))]


def test_a_change_of_our_code_ships_one_small_layer(image: Image) -> None:
    ours = {file.layer for path, file in image.files().items() if OURS.search(path)}
    assert ours == {len(image.layers) - 1}
    assert image.layers[-1] < 10e6  # and this is before it is compressed


def test_no_bytecode_is_compared_with_its_source(image: Image) -> None:
    files = image.files()
    compiled = {
        path: file
        for path, file in files.items()
        if path.endswith(".pyc") and OF_THE_BUILD.search(path) and file.member.isfile()
    }
    sources = [path for path in files if path.endswith(".py") and "site-packages" in path]
    assert len(compiled) > 0.9 * len(sources)
    # PEP 552: the second word is 1 for a hash of the source, and 2 more if that is checked.
    words = {path: content[4:8] for path, content in image.read(compiled).items()}
    assert not {path for path, word in words.items() if word != b"\x01\0\0\0"}


def test_the_list_of_packages_is_of_this_image(image: Image) -> None:
    name = image.name.rpartition("/")[2].partition(":")[0]
    text = (IMAGES / f"{name}.cdx.json").read_text(encoding="utf-8")
    made = json.loads(text)
    assert text == document(image, made["metadata"]["timestamp"])
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert made["metadata"]["component"]["bom-ref"] == image.digest
    urls = [one["purl"] for one in made["components"]]
    assert len(urls) == len(set(urls))
    python = {one["name"] for one in made["components"] if one["purl"].startswith("pkg:pypi/")}
    assert python >= {re.sub(r"[-_.]+", "-", one) for one in packages(image)}
    assert any(one.startswith("pkg:deb/debian/libc6@") for one in urls)


def test_the_operator_has_what_its_lock_names_and_no_library_of_the_trainer(
    operator_image: Image,
) -> None:
    found = packages(operator_image)
    assert found.pop("finetune-operator") == PROJECT["version"]
    wanted = locked("operator/requirements.lock")
    assert {name: found.get(name) for name in wanted} == wanted
    assert not {"torch", "transformers", "numpy"} & set(found)
    files = operator_image.files()
    assert not [path for path in files if re.search(r"bin/(cc|gcc|g\+\+)$", path)]
    assert sum(one.member.size for one in files.values()) < 400e6


def test_of_kubernetes_the_operator_has_a_twentieth(operator_image: Image) -> None:
    size = sum(
        file.member.size
        for path, file in operator_image.files().items()
        if "site-packages/kubernetes/" in path
    )
    assert 0 < size < 126e6 / 20


def test_the_operator_says_in_one_sentence_that_it_finds_no_cluster(
    operator_container: Container,
) -> None:
    done = operator_container.run("finetune-operator")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "set KUBECONFIG" in done.stdout + done.stderr


def test_ftctl_is_there_as_well(operator_container: Container) -> None:
    examples = {ROOT / "examples": "/examples"}
    done = operator_container.run("ftctl", "validate", "-f", "/examples", mounts=examples)
    assert done.returncode == 0, done.stderr
    assert "no problem" in done.stdout


def test_the_trainer_imports_every_library_that_a_job_may_need(
    trainer_container: Container,
) -> None:
    program = (
        "import accelerate, bitsandbytes, datasets, deepspeed, peft, psutil, pynvml, tensorboard\n"
        "import torch, transformers, azureml.mlflow, mlflow\n"
        "import finetune_trainer.launch.main, getpass, os, pathlib\n"
        "print(torch.__version__, getpass.getuser(), os.getuid(), pathlib.Path.home())"
    )
    done = trainer_container.run("python", "-W", "ignore", "-c", program)
    assert done.returncode == 0, done.stderr
    version, *who = done.stdout.split()[-4:]
    assert version.startswith(locked("trainer/torch.lock")["torch"])
    assert who == ["finetune", "1000", "/tmp"]


def test_the_trainer_has_what_its_pods_run_besides_python(trainer_container: Container) -> None:
    done = trainer_container.run("sh", "-c", "command -v find && find / -maxdepth 0")
    assert done.returncode == 0, done.stderr


def test_the_layers_below_our_code_need_not_be_written_again(
    operator_image: Image, tmp_path: Path
) -> None:
    about = built("operator")
    assert about is not None
    engine = Engine(about["engine"])
    if engine.name == "docker":
        pytest.skip("docker exports every layer")
    plan = build_images.plan_of("operator", about["given"])
    indexes: list[bytes] = []
    written: list[set[str]] = []
    for known in ({}, operator_image.sizes):
        folder = tmp_path / str(len(indexes))
        engine.export(plan, folder, known)
        indexes.append((folder / "index.json").read_bytes())
        written.append({f"sha256:{one.name}" for one in folder.glob("blobs/sha256/*")})
    assert indexes[0] == indexes[1]
    assert written[0] - written[1] == set(operator_image.digests[:-1])


@pytest.mark.timeout(900)  # it builds without a cache
@pytest.mark.parametrize("name", ["operator", pytest.param("trainer", marks=pytest.mark.full)])
def test_the_same_sources_give_the_same_digest(name: str, tmp_path: Path) -> None:
    about = built(name)
    assert about is not None
    made = build_images.build(name, {**about["given"], "NO_CACHE": "1"}, tmp_path)
    archives = IMAGES / about["archive"], tmp_path / str(made["archive"])
    with opened(archives[0]) as first, opened(archives[1]) as again:
        assert again.digests == first.digests
        # They name the commit, and there may be another one since.
        if again.config["Labels"] == first.config["Labels"]:
            assert again.digest == first.digest
