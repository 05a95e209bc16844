"""Objects that are kept by the hundred and seldom looked into: what they are called, and a text.

The informer of such a kind keeps them so; a backend reads them with `expand` and
puts the answers to its writes into the cache the same way.
"""

from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import Object

_NAMING = ("name", "namespace", "uid", "resourceVersion")
_SOMEBODYS = ("annotations", "creationTimestamp", "generation", "managedFields", "selfLink")


def compact(made: Object) -> Object:
    """Keep an object's names, the label that leads to its job, and a text of the rest.

    The rest is without its status and without annotations, which are not ours.
    """
    import orjson  # not among what `ftctl validate` needs

    metadata = made["metadata"]
    names = {key: metadata[key] for key in _NAMING if key in metadata}
    if job := (metadata.get("labels") or {}).get(JOB_LABEL):
        names["labels"] = {JOB_LABEL: job}
    rest = {key: one for key, one in metadata.items() if key not in (*_NAMING, *_SOMEBODYS)}
    kept = {key: one for key, one in made.items() if key not in ("apiVersion", "kind", "status")}
    text = orjson.dumps({**kept, "metadata": rest}, option=orjson.OPT_SORT_KEYS)
    return {"metadata": names, "text": text}


def expand(kept: Object) -> Object:
    """Return what `compact` has kept."""
    import orjson

    made: Object = orjson.loads(kept["text"])
    return {**made, "metadata": {**made["metadata"], **_without_labels(kept["metadata"])}}


def _without_labels(names: Object) -> Object:
    return {key: one for key, one in names.items() if key != "labels"}
