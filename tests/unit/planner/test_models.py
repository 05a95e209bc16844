import json
import math
import subprocess
import sys

import pytest

from finetune_operator.planner.models import base_shape_of, base_shape_of_job
from generate_models import known_models
from support.api.builders import job

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
# Prints the KiB that loading adds to a process with the planner; ru_maxrss has only the maximum.
LOAD = """
import json, sys
import finetune_operator.planner.train_config
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmRSS" in line)
before = resident()
from finetune_operator.planner.models import base_shape_of
assert base_shape_of("google/gemma-3-27b-it") is not None
loaded = sorted({"numpy", "torch", "transformers"}.intersection(sys.modules))
print(json.dumps([resident() - before, loaded]))
"""


@pytest.mark.parametrize("name", [LLAMA, f"hf://{LLAMA}", LLAMA.upper()])
def test_a_model_is_found_by_its_hub_name_in_any_case(name):
    shape = base_shape_of(name)
    assert shape is not None
    assert (shape.family, len(shape.order), shape.heads) == ("llama", 32, 32)


def test_an_unknown_model_has_no_shape():
    assert base_shape_of("hf://acme/none") is None


@pytest.mark.parametrize(
    ("model", "family"),
    [
        pytest.param({"source": f"hf://{LLAMA}"}, "llama", id="by source"),
        pytest.param({"source": "pvc://a/b", "baseName": LLAMA}, "llama", id="by base name"),
        pytest.param(
            {"source": "hf://acme/none", "baseName": "google/gemma-2-9b"}, "gemma2", id="renamed"
        ),
        pytest.param({"source": "pvc://a/b"}, None, id="unnamed"),
    ],
)
def test_the_model_of_a_job_is_found_by_source_or_base_name(model, family):
    shape = base_shape_of_job(job(model=model).spec.model)
    assert (None if shape is None else shape.family) == family


def test_shipped_shapes_have_the_published_numbers_of_parameters():
    known = known_models()
    assert len(known.models) >= 80
    names = [name.lower() for one in known.models for name in one.names]
    assert len(names) == len(set(names))
    for one in known.models:
        assert {one.counted_by, *one.widths_from} <= known.sources.keys()
        for name in one.names:
            shape = base_shape_of(name)
            assert shape is not None
            count = sum(math.prod(tensor.shape) for _, tensor in shape.tensors())
            assert count == one.parameters, name


def test_shapes_load_without_torch_in_10_mib():
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    kib, loaded = json.loads(done.stdout)
    assert loaded == []
    assert kib <= 10 * 1024
