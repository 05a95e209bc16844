"""The key of an attempt on several nodes, with which its pods recognise each other.

Called by `submit` for a batch Job that is about to be created. The rendered objects are printed by
`ftctl`, so they have no key; an adopted batch Job has the key of its creation.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from finetune_trainer.config import ENV_RDZV_KEY

_KEY_BYTES = 32


def with_key(batch_job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a rendered batch Job with a new key in its container's variables.

    A single node has no port for others, so its batch Job is returned as it is.
    """
    spec = batch_job["spec"]
    if spec["completions"] == 1:
        return batch_job
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    others = [one for one in container["env"] if one["name"] != ENV_RDZV_KEY]
    key = {"name": ENV_RDZV_KEY, "value": secrets.token_hex(_KEY_BYTES)}
    keyed = {**pod, "containers": [{**container, "env": [*others, key]}]}
    return {**batch_job, "spec": {**spec, "template": {**spec["template"], "spec": keyed}}}
