"""Access this run in its workspace's MLflow through Microsoft's plugin, which renews the token.

The plugin is the extra `mlflow`; importing it takes 2.4 s of CPU and 180 MB, so the thread of
`reporter` does it, in the main process of node 0.
"""

import logging
import os
from collections.abc import Mapping, Sequence

from finetune_trainer.errors import TrainerError
from finetune_trainer.launch.journal_points import Point

# Variables that Azure ML sets and the plugin requires; without the token it would open a browser.
_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_RUN_ID")
# Variables that MLflow reads on import or at each request. With MLflow's defaults a request takes
# up to 17 minutes if the service does not respond, and obeys a Retry-After of any length.
_SETTINGS = {
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
# Variable for the scope of the token. Without it, the plugin first queries management.azure.com for
# all clouds.
_CLOUD = {"AZUREML_CURRENT_CLOUD": "AzureCloud"}
# Loggers whose warnings would otherwise get into the job's log, even after the termination message.
# Failures are raised, and `reporter` logs them.
_LIBRARIES = ("azure", "azureml", "mlflow", "urllib3")


class NotReportedError(TrainerError):
    """The run cannot be reached from this process; the message names the missing part."""


class RefusedError(TrainerError):
    """The service refuses a request for a reason other than load."""


def is_run_of_azureml(environ: Mapping[str, str]) -> bool:
    """Whether Azure ML started this process, so that it can report to a run."""
    return "AZUREML_RUN_ID" in environ and "MLFLOW_TRACKING_URI" in environ


class MLflowRun:
    """The run to which this process belongs."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Import and configure MLflow; no request is sent.

        Raises:
            NotReportedError: The plugin is not installed, or Azure ML has not set its variables.
        """
        missing = [name for name in _VARIABLES if not environ.get(name)]
        if missing:
            raise NotReportedError(f"Azure ML has not set {' and '.join(missing)}")
        os.environ.update(_SETTINGS)
        os.environ.update({**_CLOUD, **os.environ})
        for name in _LIBRARIES:
            logging.getLogger(name).addHandler(logging.NullHandler())
        try:
            import azureml.mlflow  # noqa: F401 - a plugin; without it, azureml:// is unknown
            from mlflow import MlflowClient
        except ImportError as error:
            raise NotReportedError(
                f"azureml-mlflow cannot be imported ({error}); install "
                "finetune-operator[trainer,mlflow] in the environment of the job"
            ) from error
        self._id = environ["MLFLOW_RUN_ID"]
        self._client = MlflowClient(environ["MLFLOW_TRACKING_URI"])

    def tags(self) -> Mapping[str, str]:
        """Get the tags of the run; one request."""
        tags: Mapping[str, str] = self._client.get_run(self._id).data.tags
        return tags

    def report(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points to the curves and set tags; one request.

        Raises:
            RefusedError: The service refuses, possibly without naming the part.
        """
        from mlflow.entities import Metric, RunTag
        from mlflow.exceptions import RestException

        metrics = [
            Metric(name, value, timestamp=int(point.time * 1000), step=point.step)
            for point in points
            for name, value in point.values.items()
        ]
        named = [RunTag(name, value) for name, value in tags.items()]
        try:
            self._client.log_batch(self._id, metrics, tags=named)
        except RestException as error:  # MLflow's error for a response that a retry does not change
            raise RefusedError(str(error)) from error
