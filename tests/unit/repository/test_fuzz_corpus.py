"""What once ended in a traceback does no more, and a few random inputs do not either."""

from pathlib import Path

import pytest

from support.api.fuzz import KINDS, Fuzzer, corpus

NUM_INPUTS = {"manifests": 100, "rows": 10, "templates": 60}
ENDS = {
    "manifests": {"manifests validate 0", "manifests validate 1"},
    "rows": {"rows encoded", "rows refused"},
    "templates": {"templates"},
}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize(
    ("kind", "file"), [pytest.param(*one, id=f"{one[0]}/{one[1].name}") for one in corpus()]
)
def test_an_input_that_once_went_wrong_is_refused_or_taken(
    fuzzer: Fuzzer, kind: str, file: Path
) -> None:
    fuzzer.check(kind, file.read_bytes())


@pytest.mark.parametrize("kind", KINDS)
def test_random_inputs_are_refused_or_taken(fuzzer: Fuzzer, kind: str) -> None:
    for seed in range(NUM_INPUTS[kind]):
        fuzzer.check(kind, fuzzer.inputs(kind, seed))
    assert ENDS[kind] <= fuzzer.counts.keys()
