"""A compact form of objects that are cached in large numbers and rarely read.

The informer of such a kind caches this form. A backend reads it with `expand`, and stores the
responses to its writes in the same form.
"""

from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import Object

_NAMING = ("name", "namespace", "uid", "resourceVersion")
_IGNORED = ("annotations", "creationTimestamp", "generation", "managedFields", "selfLink")


def compact(obj: Object) -> Object:
    """Return the names of an object, the label of its job, and the other fields as a JSON text.

    Status and annotations are dropped, because the operator does not write them.
    """
    import orjson  # `ftctl validate` does not need it

    metadata = obj["metadata"]
    names = {key: metadata[key] for key in _NAMING if key in metadata}
    if job := (metadata.get("labels") or {}).get(JOB_LABEL):
        names["labels"] = {JOB_LABEL: job}
    rest = {key: value for key, value in metadata.items() if key not in (*_NAMING, *_IGNORED)}
    fields = {
        key: value for key, value in obj.items() if key not in ("apiVersion", "kind", "status")
    }
    text = orjson.dumps({**fields, "metadata": rest}, option=orjson.OPT_SORT_KEYS)
    return {"metadata": names, "text": text}


def expand(cached: Object) -> Object:
    """Return the object that was given to `compact`, without the dropped fields."""
    import orjson

    obj: Object = orjson.loads(cached["text"])
    names = {key: value for key, value in cached["metadata"].items() if key != "labels"}
    return {**obj, "metadata": {**obj["metadata"], **names}}
