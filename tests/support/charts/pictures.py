"""Draw `docs/how-to/*.svg`: `make pictures`. A real Prometheus answers the queries.

The pictures are of a training run of two processes, and of four ranks of which rank 3 is 20 %
slower. The runs follow one another, so that neither slows the other. Prometheus scrapes them every
two seconds, with times divided by 15.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune_trainer.config import Progress
from monitoring.draw import draw
from monitoring.generate import FILES
from monitoring.plots import Points
from monitoring.windows import Windows
from support.charts.prometheus import Prometheus, Target, filled, scraped_by
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import OperatorProcess, open_api, wait_until
from support.launch.faulty_ranks import FaultyRanks
from support.launch.launches import until
from support.telemetry.node_pages import progress_of
from support.telemetry.trained_page import learning

WINDOWS = Windows().divided(15)
FOLDER = Path(__file__).parents[3] / "docs" / "how-to"
NUM_STEPS = 600
LONGEST = 900
"""Seconds after which a run counts as too slow."""
NUM_POINTS = 120
"""Points of a line."""

Run = Callable[[Path], AbstractContextManager[str]]


@dataclass(frozen=True)
class Picture:
    """A picture of some rows of the dashboard of one job.

    Attributes:
        job: Name of the job.
        run: Runs it in a folder, and yields the address of its page.
        last_step: Step at which the picture ends.
    """

    job: str
    rows: tuple[str, ...]
    run: Run
    last_step: int


@contextmanager
def _slow_rank(folder: Path) -> Iterator[str]:
    ranks = FaultyRanks(folder / "ranks", 4, "slower", 3, FINETUNE_WATCH_SPEED="4")
    try:
        yield ranks.url.removeprefix("http://").removesuffix("/metrics")
    finally:
        ranks.close()


PICTURES = {
    "monitoring-job": Picture(
        "llama",
        ("Is it training, and how fast?", "Where the time goes"),
        partial(learning, num_steps=NUM_STEPS),
        NUM_STEPS * 9 // 10,
    ),
    "monitoring-ranks": Picture("slow", ("Which rank holds it back?",), _slow_rank, 300),
}


def main() -> int:
    """Write the pictures that the arguments name, or all; return the exit code."""
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(_drawn(PICTURES[name]))
        print(f"wrote {name}.svg")
    return 0


def _drawn(picture: Picture) -> str:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        enter = stack.enter_context
        cluster = enter(embedded_cluster(folder))
        api = enter(open_api(cluster.kubeconfig))
        namespace = enter(api.namespace("team"))
        operator = enter(OperatorProcess(cluster.kubeconfig, namespace))
        port = operator.wait_for("started")["health_port"]
        (folder / "run").mkdir()
        (folder / "prometheus").mkdir()
        address = enter(picture.run(folder / "run"))
        api.apply(namespace, picture.job)
        wait_until(lambda: bool(api.attempts(namespace)), 30)
        labels = {
            "namespace": namespace,
            "__meta_kubernetes_pod_label_finetune_dev_job": picture.job,
            "__meta_kubernetes_pod_node_name": "node-a",
        }
        targets = [
            Target("job", address, labels, scraped_by("PodMonitor")),
            Target("ops", f"127.0.0.1:{port}", {}, scraped_by("ServiceMonitor")),
        ]
        prometheus = enter(Prometheus(folder / "prometheus", targets, WINDOWS))

        def has_done(step: int) -> bool:
            """Give the operator the progress of the page; return whether a step is done."""
            text = progress_of(address)
            if text is None:
                return False
            api.play(namespace, f"{picture.job}-1", phase="Running", ready="1", progress=text)
            return Progress.model_validate_json(text).step >= step

        until(partial(has_done, 1), LONGEST)
        begin = time.time()
        until(partial(has_done, picture.last_step), LONGEST)
        end = time.time()

        def query(expr: str) -> list[tuple[dict[str, str], Points]]:
            chosen = {"namespace": namespace, "finetunejob": picture.job}
            step = max((end - begin) / NUM_POINTS, WINDOWS.interval)
            found = prometheus.ask_range(filled(expr, chosen, WINDOWS), begin, end, step)
            return [(labels, points) for labels, points in found]

        board = json.loads((FILES / "dashboards" / "job.json").read_text())
        return draw(board, picture.rows, query)


if __name__ == "__main__":
    sys.exit(main())
