"""Who may import whom: no deep-learning library above the trainer, and no cycle anywhere."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE_ROOTS = (ROOT / "operator", ROOT / "trainer")
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
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


@pytest.mark.parametrize(
    ("module", "imported", "broken"),
    [
        pytest.param(
            "operator/finetune_operator/planner/plan.py",
            "finetune_trainer.errors",
            "the operator knows only the trainer's contract",
            id="operator imports a trainer module outside the contract",
        ),
        pytest.param(
            "trainer/finetune_trainer/model/loss.py",
            "finetune_trainer.checkpoint.store",
            "the trainer is layered",
            id="trainer module imports from a layer above it",
        ),
        pytest.param(
            "trainer/finetune_trainer/unplaced.py",
            "finetune_trainer.config",
            "the trainer is layered",
            id="trainer module belongs to no layer",
        ),
    ],
)
def test_an_import_against_the_contracts_is_refused(
    module: str, imported: str, broken: str, tmp_path: Path
) -> None:
    for root in SOURCE_ROOTS:
        shutil.copytree(root, tmp_path / root.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / module).open("a", encoding="utf-8") as file:
        file.write(f"\n\ndef late() -> None:\n    import {imported}\n")
    paths = os.pathsep.join(str(tmp_path / root.name) for root in SOURCE_ROOTS)

    result = subprocess.run(
        [LINT_IMPORTS, "--config", str(ROOT / "pyproject.toml"), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )

    assert result.returncode == 1, result.stderr
    [line] = [one for one in result.stdout.splitlines() if "BROKEN" in one]
    assert broken in line
