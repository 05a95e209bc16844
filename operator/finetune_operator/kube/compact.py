"""A compact form of objects that are kept by the hundred and seldom read: names, and a JSON text.

The informer of such a kind keeps them so; a backend reads them with `expand`, and puts the answers
to its writes into the cache in the same form.
"""

from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import Object

_NAMING = ("name", "namespace", "uid", "resourceVersion")
_IGNORED = ("annotations", "creationTimestamp", "generation", "managedFields", "selfLink")


def compact(made: Object) -> Object:
    """Keep an object's names, the label that leads to its job, and a JSON text of the rest.

    Status and annotations are dropped, as they are not ours.
    """
    import orjson  # `ftctl validate` does without it

    metadata = made["metadata"]
    names = {key: metadata[key] for key in _NAMING if key in metadata}
    if job := (metadata.get("labels") or {}).get(JOB_LABEL):
        names["labels"] = {JOB_LABEL: job}
    rest = {key: one for key, one in metadata.items() if key not in (*_NAMING, *_IGNORED)}
    kept = {key: one for key, one in made.items() if key not in ("apiVersion", "kind", "status")}
    text = orjson.dumps({**kept, "metadata": rest}, option=orjson.OPT_SORT_KEYS)
    return {"metadata": names, "text": text}


def expand(kept: Object) -> Object:
    """Return the object that `compact` was given, as far as it was kept."""
    import orjson

    made: Object = orjson.loads(kept["text"])
    names = {key: one for key, one in kept["metadata"].items() if key != "labels"}
    return {**made, "metadata": {**made["metadata"], **names}}
