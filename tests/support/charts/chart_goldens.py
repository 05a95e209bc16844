"""What helm makes of the chart with each of its values files; run it to write the goldens anew.

    PYTHONPATH=tests python tests/support/charts/chart_goldens.py

A golden has the objects by kind and name, so that it does not depend on helm's order, with the
version of the project and the text of the chart's files left out. That of `defaults` has all of
them, each other what differs from it. The definitions are in `crds/`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from finetune_operator import __version__
from support.charts.helm_chart import CHART, Json, made_of

VALUES = {
    file.name.removesuffix("-values.yaml"): file
    for file in sorted((CHART / "ci").glob("*-values.yaml"))
}
GOLDENS = Path(__file__).parents[2] / "goldens" / "chart"
DEFAULTS = "defaults"
_FILES = {
    file.read_text(encoding="utf-8").strip(): file.relative_to(CHART).as_posix()
    for file in sorted((CHART / "files").rglob("*.*"))
}
_RULES = yaml.safe_load((CHART / "files" / "rules.yaml").read_text(encoding="utf-8"))


@cache
def objects(name: str) -> Mapping[str, Json]:
    """Return what helm makes with a values file by `KIND NAMESPACE/NAME`, without definitions."""
    made = made_of("--values", str(VALUES[name]), "--set", "crds.install=false")
    return {_place(one): one for one in sorted(made, key=_place)}


def golden(name: str) -> str:
    """Return what stands in the golden of a values file."""
    shown, usual = objects(name), {} if name == DEFAULTS else objects(DEFAULTS)
    lines = [f"# {CHART.name}/{VALUES[name].relative_to(CHART)}"]
    if usual:
        lines.append("# Only what differs from defaults.yaml.")
    lines += [f"# Not made: {place}" for place in usual if place not in shown]
    changed = [_without_files(one) for place, one in shown.items() if usual.get(place) != one]
    text = yaml.safe_dump_all(
        changed, sort_keys=False, default_flow_style=None, explicit_start=True, width=96
    )
    return "\n".join(lines) + "\n" + str(text).replace(__version__, "VERSION")


def _place(made: Json) -> str:
    metadata = made["metadata"]
    return f"{made['kind']} {metadata.get('namespace', '')}/{metadata['name']}"


def _without_files(value: Any) -> Any:
    """Name the file where a value is the content of one."""
    if value == _RULES:
        return "files/rules.yaml"
    if isinstance(value, dict):
        return {key: _without_files(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_files(one) for one in value]
    return _FILES.get(value.strip(), value) if isinstance(value, str) else value


if __name__ == "__main__":
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for known in VALUES:
        (GOLDENS / f"{known}.yaml").write_text(golden(known), encoding="utf-8")
