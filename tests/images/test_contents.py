"""Contents of the images: files, packages, layers, programs, and the digest of a second build."""

import re
import tomllib
from pathlib import Path

import pytest

import build_images
from support.images.image_archive import ImageArchive, open_archive
from support.images.image_runs import IMAGES, Container, built

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Modules that the build compiles: our environment and the used parts of the standard library.
OF_THE_BUILD = re.compile(
    r"^opt/finetune/|/lib/python3\.\d+/(?!(site|dist)-packages/|"
    r"(ensurepip|idlelib|lib2to3|pydoc_data|test|turtledemo)/)"
)
OURS = re.compile(r"site-packages/finetune_(operator|trainer)\b")


def packages(image: ImageArchive) -> dict[str, str]:
    """Return the versions of Python packages by name."""
    found = re.compile(r"site-packages/([^/]+)-([^/]+)\.dist-info/METADATA$")
    parts = (found.search(path) for path in image.files())
    return {one[1].replace("_", "-").lower(): one[2] for one in parts if one}


def locked(*names: str) -> dict[str, str]:
    """Return the versions that locks name for every platform."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", text, flags=re.MULTILINE))


def test_image_runs_as_a_numeric_user_with_python_on_its_path(image: ImageArchive) -> None:
    user, _, group = image.config["User"].partition(":")
    assert user.isdigit()
    assert group.isdigit()
    assert int(user) > 0
    (path,) = (one for one in image.config["Env"] if one.startswith("PATH="))
    first = path.removeprefix("PATH=").split(":")[0].strip("/")
    assert f"{first}/python" in image.files()


def test_labels_name_version_title_license_and_source(image: ImageArchive) -> None:
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


def test_image_has_neither_pip_nor_files_that_only_the_build_needs(image: ImageArchive) -> None:
    files = image.files()
    assert not [path for path in files if re.search(r"/pip-[^/]*(dist-info|\.whl)|/pip/", path)]
    assert not {"tools", "wheels", "src", "layer", "built"} & {path.split("/")[0] for path in files}
    assert not [path for path in files if path.endswith(("pip.conf", "99build", "/ca.pem"))]


def test_a_change_of_our_code_ships_one_small_layer(image: ImageArchive) -> None:
    ours = {file.layer for path, file in image.files().items() if OURS.search(path)}
    assert ours == {len(image.layers) - 1}
    assert image.sizes[-1] < 10e6  # not compressed


def test_no_bytecode_is_compared_with_its_source(image: ImageArchive) -> None:
    files = image.files()
    compiled = {
        path: file
        for path, file in files.items()
        if path.endswith(".pyc") and OF_THE_BUILD.search(path) and file.member.isfile()
    }
    sources = [path for path in files if path.endswith(".py") and "site-packages" in path]
    assert len(compiled) > 0.9 * len(sources)
    # PEP 552: bit 0 of the second word marks a hash of the source, bit 1 that imports check it.
    words = {path: content[4:8] for path, content in image.read(compiled).items()}
    assert not {path for path, word in words.items() if word != b"\x01\0\0\0"}


def test_operator_has_the_locked_packages_and_no_library_of_the_trainer(
    operator_image: ImageArchive,
) -> None:
    found = packages(operator_image)
    assert found.pop("finetune-operator") == PROJECT["version"]
    wanted = locked("operator/requirements.lock")
    assert {name: found.get(name) for name in wanted} == wanted
    assert not {"torch", "transformers", "numpy"} & set(found)
    files = operator_image.files()
    assert not [path for path in files if re.search(r"bin/(cc|gcc|g\+\+)$", path)]
    assert sum(one.member.size for one in files.values()) < 400e6


def test_operator_has_a_twentieth_of_the_package_kubernetes(operator_image: ImageArchive) -> None:
    size = sum(
        file.member.size
        for path, file in operator_image.files().items()
        if "site-packages/kubernetes/" in path
    )
    assert 0 < size < 126e6 / 20


def test_operator_without_a_cluster_prints_one_sentence(
    operator_container: Container,
) -> None:
    done = operator_container.run("finetune-operator")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "set KUBECONFIG" in done.stdout + done.stderr


def test_operator_image_runs_ftctl(operator_container: Container) -> None:
    examples = {ROOT / "examples": "/examples"}
    done = operator_container.run("ftctl", "validate", "-f", "/examples", mounts=examples)
    assert done.returncode == 0, done.stderr
    assert "no problem" in done.stdout


def test_trainer_imports_every_library_that_a_job_may_need(
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


def test_trainer_has_the_shell_commands_of_its_pods(trainer_container: Container) -> None:
    done = trainer_container.run("sh", "-c", "command -v find && find / -maxdepth 0")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(900)  # it builds without a cache
@pytest.mark.parametrize("name", ["operator", pytest.param("trainer", marks=pytest.mark.full)])
def test_same_sources_give_the_same_digest(name: str, tmp_path: Path) -> None:
    record = built(name)
    assert record is not None
    again = build_images.build(name, {**record["environ"], "NO_CACHE": "1"}, tmp_path)
    archives = IMAGES / record["archive"], tmp_path / again["archive"]
    with open_archive(archives[0]) as first, open_archive(archives[1]) as second:
        assert second.layers == first.layers
        assert (first.id, second.id) == tuple(f"sha256:{one['id']}" for one in (record, again))
        # Labels name the commit, which may have changed since the first build.
        if second.config["Labels"] == first.config["Labels"]:
            assert second.id == first.id
