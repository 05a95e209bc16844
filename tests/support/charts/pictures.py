"""Draw `docs/how-to/*.svg`: `make pictures`. What is drawn is asked of a real Prometheus.

One picture is of a training run of two processes, one of four ranks of which one is 20 % slower.
Both are scraped each second for a minute, with times divided by 30.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from monitoring.draw import draw
from monitoring.generate import FILES
from monitoring.windows import Windows
from support.charts.prometheus import Prometheus, Target, filled, scraped_by
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import OperatorProcess, open_api, wait_until
from support.launch.faulty_ranks import FaultyRanks
from support.launch.launches import until
from support.telemetry.node_pages import ask
from support.telemetry.trained_page import training

WINDOWS = Windows().divided(30)
FOLDER = Path(__file__).parents[3] / "docs" / "how-to"
PICTURES = {
    "monitoring-job": ("llama", ("Is it training, and how fast?", "Where the time goes")),
    "monitoring-ranks": ("slow", ("Which rank holds it back?",)),
}


def main() -> int:
    """Run, wait, ask and draw; return the exit code."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        enter = stack.enter_context
        cluster = enter(embedded_cluster(folder))
        api = enter(open_api(cluster.kubeconfig))
        namespace = enter(api.namespace("team"))
        operator = enter(OperatorProcess(cluster.kubeconfig, namespace))
        (folder / "run").mkdir()
        (folder / "prometheus").mkdir()
        page = enter(training(folder / "run"))
        ranks = FaultyRanks(folder / "slow", 4, "slower", 3, FINETUNE_WATCH_SPEED="4")
        stack.callback(ranks.close)
        pages = {"llama": page, "slow": ranks.url.removeprefix("http://").removesuffix("/metrics")}
        for job in pages:
            api.apply(namespace, job)
        wait_until(lambda: len(api.attempts(namespace)) == len(pages), 30)
        targets = [
            Target(
                job,
                address,
                {
                    "namespace": namespace,
                    "__meta_kubernetes_pod_label_finetune_dev_job": job,
                    "__meta_kubernetes_pod_node_name": "node-a",
                },
                scraped_by("PodMonitor"),
            )
            for job, address in pages.items()
        ]
        port = operator.wait_for("started")["health_port"]
        targets.append(Target("ops", f"127.0.0.1:{port}", {}, scraped_by("ServiceMonitor")))
        prometheus = enter(Prometheus(folder / "prometheus", targets, WINDOWS))

        def is_over(end: float) -> bool:
            for job, address in pages.items():
                answer = ask(f"http://{address}/metrics", "GET", "/progress")
                if answer.status == 200:
                    said = {"phase": "Running", "ready": "1", "progress": answer.text}
                    api.play(namespace, f"{job}-1", **said)
            return time.time() > end

        until(partial(_answers, list(pages.values())), 120)
        begin = time.time() + 15
        until(partial(is_over, begin + 60), 180)

        def ranges(
            job: str, expr: str
        ) -> Sequence[tuple[dict[str, str], list[tuple[float, float]]]]:
            chosen = {"namespace": namespace, "finetunejob": job}
            return prometheus.ask_range(filled(expr, chosen, WINDOWS), begin, begin + 60)

        board = json.loads((FILES / "dashboards" / "job.json").read_text())
        for picture, (job, rows) in PICTURES.items():
            file = FOLDER / f"{picture}.svg"
            file.write_text(draw(board, rows, partial(ranges, job)))
            print(f"wrote {file.name}")
    return 0


def _answers(addresses: Sequence[str]) -> bool:
    try:
        return all(
            ask(f"http://{one}/metrics", "GET", "/progress").status == 200 for one in addresses
        )
    except ConnectionRefusedError:
        return False


if __name__ == "__main__":
    sys.exit(main())
