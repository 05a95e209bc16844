"""Backends are found by name; what is broken or missing is said, never hidden."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from finetune_operator.backends import registry
from finetune_operator.errors import BrokenBackendError, UnknownBackendError

FAKE = "support.kernel.fake_backend:FakeBackend"


def point(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, target, registry.GROUP)


def test_the_local_backend_is_registered_by_this_package() -> None:
    assert {"kubernetes", "azureml", "local"} <= set(registry.available())
    assert registry.load("local").name == "local"


def test_names_are_listed_without_importing_a_plugin() -> None:
    code = (
        "import sys; from finetune_operator.backends import registry; registry.available(); "
        "print([name for name in sys.modules if name.startswith('finetune_operator.backends.l')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_available_names_are_sorted_and_a_broken_plugin_is_among_them() -> None:
    points = [point("zeta", "no.such.module:Class"), point("alpha", FAKE)]
    assert registry.available(points) == ("alpha", "zeta")


def test_an_unknown_name_lists_what_is_available_and_what_to_install() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        registry.load("slurm", [point("fake", FAKE)])
    assert str(caught.value) == (
        "spec.backend.type slurm is not installed (available: fake); use an available one, or "
        "install the plugin that registers slurm under finetune_operator.backends"
    )


def test_without_any_backend_the_message_says_to_install_the_package() -> None:
    with pytest.raises(UnknownBackendError, match="pip install finetune-operator"):
        registry.load("local", [])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        pytest.param("no.such.module:Class", "ModuleNotFoundError", id="module is missing"),
        pytest.param("json:NoSuchClass", "AttributeError", id="class is missing"),
        pytest.param(
            "json:JSONDecoder",
            "does not inherit finetune_operator.backends.base.Backend",
            id="not a backend",
        ),
        pytest.param("os:name", "does not inherit", id="not a class"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_broken_with_its_cause(target: str, said: str) -> None:
    with pytest.raises(BrokenBackendError, match=said) as caught:
        registry.load("plugin", [point("plugin", target)])
    assert target in str(caught.value)


def test_a_failed_import_keeps_its_exception_as_the_cause() -> None:
    with pytest.raises(BrokenBackendError) as caught:
        registry.load("plugin", [point("plugin", "no.such.module:Class")])
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_one_name_with_two_targets_is_refused_and_the_same_target_twice_is_not() -> None:
    same = [point("fake", FAKE), point("fake", FAKE)]
    assert registry.load("fake", same).name == "fake"
    with pytest.raises(BrokenBackendError, match="uninstall all but one"):
        registry.load("fake", [*same, point("fake", "json:JSONDecoder")])
