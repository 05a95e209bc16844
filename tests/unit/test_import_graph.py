"""Who may import whom: no deep-learning library above the trainer, and no cycle anywhere."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = (ROOT / "operator", ROOT / "trainer")
DEEP_LEARNING = ["accelerate", "datasets", "deepspeed", "peft", "torch", "transformers"]
NOT_PYDANTIC = [*DEEP_LEARNING, "kopf", "kubernetes", "numpy", "rich", "typer", "yaml", "cel"]

# A None in sys.modules makes every import of that name fail, as if it were not installed.
IMPORT_BLOCKED = """
import importlib, json, sys
blocked, names = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(blocked))
for name in names:
    importlib.import_module(name)
"""


def modules() -> dict[str, Path]:
    """Map every module of both packages to its file."""
    found = {}
    for root in SOURCE_ROOTS:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_blocked(blocked: list[str], names: list[str]) -> subprocess.CompletedProcess[str]:
    """Import `names` in a process where `blocked` are not installed."""
    paths = os.pathsep.join(str(root) for root in SOURCE_ROOTS)
    return subprocess.run(
        [sys.executable, "-c", IMPORT_BLOCKED, json.dumps([blocked, names])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def imports_at_load(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the modules of ours that `path` imports when it is loaded, not inside a function."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in known else node.module
                if target in known:
                    yield target
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of `graph`, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for after in sorted(graph.get(name, ())):
            if cycle := visit(after, [*path, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


def test_whole_operator_imports_where_no_deep_learning_library_is_installed() -> None:
    names = [name for name in modules() if name.startswith("finetune_operator")]
    assert "finetune_operator.planner.plan" in names

    result = import_blocked(DEEP_LEARNING, [n for n in names if not n.endswith("__main__")])

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["finetune_trainer.config", "finetune_trainer.errors"])
def test_shared_contract_imports_with_pydantic_alone(name: str) -> None:
    result = import_blocked(NOT_PYDANTIC, [name])

    assert result.returncode == 0, result.stderr


def test_the_page_of_a_node_is_served_where_no_deep_learning_library_is_installed() -> None:
    result = import_blocked([*DEEP_LEARNING, "numpy"], ["finetune_trainer.telemetry.node.__main__"])

    assert result.returncode == 0, result.stderr


def test_a_job_is_run_on_this_machine_where_no_library_of_a_cluster_is_installed() -> None:
    of_a_cluster = ["aiohttp", "jsonpatch", "kopf", "kubernetes", "prometheus_client"]

    result = import_blocked(of_a_cluster, ["finetune_operator.cli.run"])

    assert result.returncode == 0, result.stderr


def test_a_blocked_library_cannot_be_imported() -> None:
    result = import_blocked(["typer"], ["finetune_operator.cli.app"])

    assert "typer" in result.stderr
    assert result.returncode == 1


def test_no_module_imports_itself_over_others() -> None:
    known = modules()
    graph = {name: set(imports_at_load(path, set(known))) for name, path in known.items()}
    assert graph["finetune_operator.planner.plan"] >= {"finetune_operator.api.problems"}

    assert find_cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_the_import_contract_names_every_part_of_the_trainer_but_its_config() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [
        one
        for one in settings["tool"]["importlinter"]["contracts"]
        if "only the trainer's contract" in one["name"]
    ]
    parts = {".".join(name.split(".")[:2]) for name in modules() if "finetune_trainer." in name}
    forbidden = {name for name in contract["forbidden_modules"] if "finetune_trainer." in name}
    assert forbidden == parts - {"finetune_trainer.config"}
