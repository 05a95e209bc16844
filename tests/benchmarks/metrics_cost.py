"""What a rank's telling costs its training: phases, step reports, numbers for the page.

    python tests/benchmarks/metrics_cost.py [--rounds 3] [--out docs/benchmarks]

Two ranks train through the ordinary launcher, their page is scraped each second, and each adds up
the time of its own telling. An A/B of step times cannot show half a percent, so it stands beside,
with the interval within which chance alone keeps it. `make bench-metrics` runs it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from measured import FOLDER, ROOT, Limit, commit, figures_table, machine, spread
from metrics_ranks import ENV_COURSE, Course

from finetune_operator.api.validation import load_job
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.planner.plan import make_plan
from finetune_trainer.config import TrainConfig
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs
from support.telemetry.node_pages import ask, free_ports

TINY_STEP_SECONDS = (0.02, 0.04)
LIMITS = {"overhead_ratio_tiny": Limit(0.005), "overhead_ratio_realistic": Limit(0.001)}
_MEANING = {
    "overhead_ratio_tiny": "time of telling by time of the steps, worst rank; DDP of a tiny model",
    "overhead_ratio_realistic": "the same; the quickstart",
    "step_seconds_tiny": "a step of the tiny model",
    "step_seconds_realistic": "a step of the quickstart",
}
_RUN = "import sys; from finetune_trainer.launch.main import main; main(sys.argv[1:], entry=%r)"
Result = dict[str, Any]


def main() -> None:
    """Measure, then write metrics.json and metrics.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measured = measure(Path(name), options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(measured, indent=2) + "\n")
    (options.out / "metrics.md").write_text(page(measured))
    print(page(measured))


def measure(folder: Path, rounds: int) -> Result:
    """Return the figures of so many rounds, tiny and realistic in turn."""
    write_inputs(folder)
    (folder / ".quickstart").symlink_to(ROOT / "examples" / ".quickstart")
    rows = _rows_of_a_tiny_step(folder)
    runs: dict[str, list[Result]] = {"tiny": [], "realistic": []}
    for number in range(rounds):
        where = folder / f"round-{number}"
        where.mkdir()
        course = Course(150, 600, 40, 10, number, str(where))
        runs["tiny"].append(_train(_tiny(folder, course, rows), course))
        course = Course(3, 20, 6, 4, number, str(where))
        runs["realistic"].append(_train(_quickstart(folder, course), course))
        print(json.dumps({name: each[-1]["ratio"] for name, each in runs.items()}), flush=True)
    figures: Result = {}
    for name, each in runs.items():
        figures[f"overhead_ratio_{name}"] = spread([one["ratio"] for one in each], digits=6)
        figures[f"step_seconds_{name}"] = spread([one["step_seconds"] for one in each])
    return {
        **figures,
        "interleaved": {name: _interleaved(each) for name, each in runs.items()},
        "microseconds_a_step": {name: _by_call(each) for name, each in runs.items()},
        "rows_of_a_tiny_step": rows,
        "runs": runs,
        "machine": machine(),
        "commit": commit(),
    }


def page(measured: Result) -> str:
    """Return the report for people, as Markdown."""
    where = measured["machine"]
    lines = [
        "# What telling costs the training",
        "",
        "Written by `make bench-metrics`. Two gloo ranks train through the launcher and serve "
        "their page, which is scraped each second. Whatever tells (phases, step reports, progress, "
        "journal, numbers of the page, and what stands around collectives) is timed inside the "
        "ranks and divided by the wall time of the same steps; the worst rank counts; "
        f"{len(measured['runs']['tiny'])} rounds.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores; Python {where['python']}; commit "
        f"{measured['commit'][:12]}.",
        "",
        *figures_table(measured, _MEANING, LIMITS, digits=5),
        "",
        "## Where it goes",
        "",
        "Microseconds a step, worst rank, median of the rounds.",
        "",
        "| call | tiny | realistic |",
        "|---|---:|---:|",
    ]
    tiny, realistic = (measured["microseconds_a_step"][kind] for kind in ("tiny", "realistic"))
    lines += [
        f"| `{name}` | {tiny.get(name, 0):.1f} | {realistic.get(name, 0):.1f} |"
        for name in sorted({*tiny, *realistic})
    ]
    lines += [
        "",
        "## Step times with and without",
        "",
        "In the same processes, blocks of steps in an order that chance decides: without phases "
        "and reports, without them once more, and with them; collectives are watched in all. "
        "Medians of the blocks by that of the first kind, with 95 % intervals by resampling. The "
        "first row says what this machine can tell apart.",
        "",
        "| step time by that without | tiny | realistic |",
        "|---|---|---|",
    ]
    for kind, name in (("plain again", "without, once more"), ("told", "with")):
        cells = [
            "{ratio:.4f} ({low:.4f} to {high:.4f})".format(**measured["interleaved"][size][kind])
            for size in ("tiny", "realistic")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _tiny(folder: Path, course: Course, rows: int) -> TrainConfig:
    """Return a run of a two-layer model, whose step takes so many rows."""
    return train_config(
        Path(course.folder) / "tiny",
        model={"path": str(folder / "model")},
        data={"train": {"path": str(folder / "train.jsonl")}, "max_seq_len": 64},
        training={
            "max_steps": course.steps,
            "global_batch_size": rows,
            "micro_batch_size": rows // 2,
        },
        checkpoint={"every_steps": 10 * course.steps},
        telemetry={"metrics_port": free_ports(1)},
    )


def _rows_of_a_tiny_step(folder: Path) -> int:
    """Return how many rows make a step of 20 to 40 ms on this machine."""
    least, most = TINY_STEP_SECONDS
    seconds = []
    for rows in (4, 8, 12, 16, 24, 32, 48, 64):
        where = folder / f"rows-{rows}"
        where.mkdir()
        course = Course(30, 60, 0, 1, 0, str(where))
        seconds.append(_train(_tiny(folder, course, rows), course)["step_seconds"])
        if least * 1.2 <= seconds[-1] <= most:
            return rows
    sys.exit(f"no number of rows makes a step of {least} to {most} s here: {seconds}")


def _quickstart(folder: Path, course: Course) -> TrainConfig:
    """Return the quickstart, for so many steps, with neither evaluation nor answers."""
    made = yaml.safe_load((ROOT / "examples" / "00-quickstart.yaml").read_text())
    spec = made["spec"]
    made["metadata"]["name"] = f"quickstart-{course.seed}"
    del spec["dataset"]["evalSource"], spec["training"]["epochs"]
    spec["training"] |= {"maxSteps": course.steps, "warmup": 0}
    spec["checkpoint"] = {"everySteps": 10 * course.steps}
    spec["observability"] = {"metricsPort": free_ports(1)}
    file = folder / f"quickstart-{course.seed}.yaml"
    file.write_text(yaml.safe_dump(made))
    job, where = load_job(file)
    backend = LocalBackend(BackendContext(where.directory, dict(os.environ)))
    _, config, _ = backend.render(make_plan(job), Attempt(1)).objects
    return TrainConfig.model_validate(config["content"])


def _train(config: TrainConfig, course: Course) -> Result:
    """Run it; return what its ranks found."""
    path = Path(course.folder) / f"{config.job.name}.json"
    path.write_text(config.to_json())
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tests' / 'benchmarks'}",
        "HF_HUB_OFFLINE": "1",
        ENV_COURSE: json.dumps(asdict(course)),
    }
    command = [sys.executable, "-c", _RUN % "metrics_ranks:run", str(path)]
    with path.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        scrapes = _scrape_until(process, f"http://127.0.0.1:{config.telemetry.metrics_port}/")
    if process.returncode != 0 or scrapes == 0:
        sys.exit(
            f"{config.job.name} ended {process.returncode} after {scrapes} scrapes: "
            f"{path.with_suffix('.log').read_text()[-3000:]}"
        )
    ranks = [json.loads((path.parent / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    told = [sum(one["telling"].values()) / one["wall"] for one in ranks]
    worst = ranks[told.index(max(told))]
    return {
        "ratio": max(told),
        "step_seconds": worst["wall"] / course.told,
        "microseconds": {
            name: 1e6 * seconds / course.told for name, seconds in worst["telling"].items()
        },
        "blocks": worst["blocks"],
        "scrapes": scrapes,
    }


def _scrape_until(process: "subprocess.Popen[bytes]", url: str) -> int:
    """Ask the page each second until the process has ended; return how often it answered."""
    answered = 0
    while True:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            try:
                answered += ask(url, "GET", "/metrics").status == 200
            except ConnectionError:
                continue  # it begins later, or has just ended
        else:
            return answered


def _by_call(runs: Sequence[Result]) -> dict[str, float]:
    """Return what each call takes in a step, the median of all runs."""
    names = sorted({name for one in runs for name in one["microseconds"]})
    return {name: median([one["microseconds"].get(name, 0.0) for one in runs]) for name in names}


def _interleaved(runs: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return the step times of two kinds of blocks by those of the first, all rounds together."""
    blocks = {
        kind: [seconds for one in runs for seconds in one["blocks"][kind]]
        for kind in ("plain", "plain again", "told")
    }
    return {kind: _ratio(blocks[kind], blocks["plain"]) for kind in ("plain again", "told")}


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return the ratio of the medians, and where 95 % of its resamplings lie."""
    chance = random.Random(0)
    found = sorted(
        median(chance.choices(above, k=len(above))) / median(chance.choices(below, k=len(below)))
        for _ in range(2000)
    )
    return {"ratio": median(above) / median(below), "low": found[50], "high": found[1949]}


if __name__ == "__main__":
    main()
