"""`ftctl run`, `logs`, `render` and `preview` on a tiny model, as a user calls them."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.api.builders import manifest
from support.data.text_fixtures import tiny_model

FTCTL = [sys.executable, "-m", "finetune_operator"]
ENDLESS = 100_000  # steps; far more than any test waits for


def write_project(folder: Path, **overrides: Any) -> Path:
    """Write a model, rows and a manifest of a short job; return the manifest."""
    tiny_model(folder / "model")
    rows = [{"prompt": f"What is {i} plus {i}?", "completion": f"{2 * i}."} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    settings = {
        "dataset.evalSource": "file://./eval.jsonl",
        "training": {"maxSeqLength": 64, "maxSteps": 4, "learningRate": 1e-2},
        "checkpoint.everySteps": 2,
        "observability.samplePrompts": ["What is 3 plus 3?"],
        # Beside other tests a second thread waits for a core, and the first spins meanwhile.
        "backend": {"type": "local", "local": {"threadsPerProcess": 1}},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(manifest(name="tiny", **{**settings, **overrides})))
    return file


def environment(folder: Path) -> dict[str, str]:
    """This process's environment with a token cache of the test's own."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}


def ftctl(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FTCTL, *map(str, arguments)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )


class Running:
    """An `ftctl` whose lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> str:
        """Return the first line that matches; fails when the output ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line matches {pattern!r} in:\n" + "\n".join(self.lines))

    def leave(self) -> tuple[int, str]:
        """Read nothing more; return the exit code and what was said on standard error."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        said = self.process.stderr.read()
        return self.process.wait(), said

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait()


@contextmanager
def started(
    *arguments: object, folder: Path, stderr: int = subprocess.STDOUT, **variables: str
) -> Iterator[Running]:
    process = subprocess.Popen(
        [*FTCTL, *map(str, arguments)],
        cwd=folder,
        env=environment(folder) | variables,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:  # the test failed; SIGTERM and SIGINT together kill the job
            process.terminate()
            process.send_signal(signal.SIGINT)
        for stream in (process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                stream.read()
                stream.close()
        process.wait()


NOISE = "a library prints this"


def with_noise(folder: Path) -> dict[str, str]:
    """Return an environment in which every process of the trainer prints what libraries print."""
    (folder / "sitecustomize.py").write_text(
        "import sys, warnings\n"
        "if any('finetune_trainer' in word for word in sys.orig_argv):\n"
        f"    print({NOISE!r}, flush=True)\n"
        f"    warnings.warn({NOISE!r})\n"
    )
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return environment(folder) | {"PYTHONPATH": ":".join(filter(None, paths))}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which `ftctl run job.yaml` has completed, and what it printed.

    Libraries of the trainer print lines of their own.
    """
    folder = tmp_path_factory.mktemp("a project")
    file = write_project(folder)
    command = [*FTCTL, "run", file.name]
    done = subprocess.run(
        command, cwd=folder, env=with_noise(folder), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.full
def test_no_line_of_a_library_is_printed(complete: tuple[Path, str]) -> None:
    folder, output = complete
    logs = (folder / "runs/default/tiny/attempts/1").glob("*.log")
    assert any(NOISE in log.read_text() for log in logs)
    assert NOISE not in output
    for command in ("validate", "preview"):
        done = subprocess.run(
            [*FTCTL, command, "job.yaml"],
            cwd=folder,
            env=with_noise(folder),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert NOISE not in done.stdout


@pytest.mark.full
def test_the_output_of_a_trainer_that_crashes_is_printed(complete: tuple[Path, str]) -> None:
    folder, _ = complete
    broken = with_noise(folder)
    file = folder / "sitecustomize.py"
    file.write_text(f"{file.read_text()}    sys.exit('it crashed')\n")
    try:
        done = subprocess.run(
            [*FTCTL, "preview", "job.yaml"], cwd=folder, env=broken, capture_output=True, text=True
        )
    finally:
        file.unlink()
    assert done.returncode == 1
    assert "it crashed" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("see its output above")


def test_run_prints_phases_losses_and_answers(complete: tuple[Path, str]) -> None:
    _, output = complete
    lines = [line.strip() for line in output.splitlines()]

    # Four steps may lie between two looks, so not every phase is seen; the first one lasts.
    assert any(line.endswith("  Loading") for line in lines)
    assert any(re.search(r"step 4/4  loss \d", line) for line in lines)
    assert any(re.match(r"held-out loss +\d\.\d+ → \d\.\d+ \(-\d+\.\d %\)", line) for line in lines)
    assert any(re.match(r"question +What is 3 plus 3\?", line) for line in lines)
    assert any(re.match(r"adapter +runs/default/tiny/output$", line) for line in lines)
    curves = r"curves +\S.* --logdir runs/default/tiny/tensorboard$"
    assert any(re.match(curves, line) for line in lines)
    assert lines[0].endswith("  Ctrl-C saves a checkpoint and stops; the same command resumes")
    assert "\x1b" not in output


def test_the_command_for_the_curves_finds_those_of_the_run(complete: tuple[Path, str]) -> None:
    folder, output = complete
    found = re.search(r" --logdir (.+)", output)
    assert found
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / found[1]))
    events.Reload()
    assert "train/loss" in events.Tags()["scalars"]


@pytest.mark.full
def test_the_three_lines_of_python_load_the_adapter_offline(complete: tuple[Path, str]) -> None:
    folder, output = complete
    lines = output.split("Load it with:\n\n")[1].splitlines()
    program = [
        *lines,
        "ids = tokenizer('What is 3 plus 3?', return_tensors='pt')",
        "assert model(**ids).logits.isfinite().all()",
        "assert any('lora_B' in name for name, _ in model.named_parameters())",
    ]

    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )

    assert len(lines) == 3
    assert done.returncode == 0, done.stderr


def test_logs_are_found_by_manifest_name_and_folder(complete: tuple[Path, str]) -> None:
    folder, _ = complete
    printed = [
        ftctl("logs", named, folder=folder).stdout
        for named in ("job.yaml", "tiny", "runs/default/tiny")
    ]

    assert printed[0]
    assert printed == [printed[0]] * 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["other"], "no run of a job called other below", id="unknown name"),
        pytest.param(["other.yaml"], "other.yaml does not exist", id="missing file"),
        pytest.param(["."], ". is not a run directory: it has no job.json", id="other folder"),
        pytest.param(["tiny", "--rank", "99"], "attempt 1 has rank 0 alone", id="no such rank"),
        pytest.param(["tiny", "--previous"], "no attempt before the first", id="no previous"),
    ],
)
def test_logs_say_what_is_not_there(
    complete: tuple[Path, str], arguments: list[str], sentence: str
) -> None:
    done = ftctl("logs", *arguments, folder=complete[0])

    assert sentence in done.stderr
    assert done.returncode == 1


def test_render_prints_what_was_submitted(complete: tuple[Path, str]) -> None:
    folder, _ = complete
    used = json.loads((folder / "runs/default/tiny/attempts/1/config.json").read_text())

    request = json.loads(ftctl("render", "job.yaml", "-o", "json", folder=folder).stdout)

    [rendered] = [
        thing["content"]
        for thing in request["objects"]
        if thing.get("path", "").endswith("config.json")
    ]
    assert rendered["job"].pop("uid") == ""
    assert used["job"].pop("uid")
    assert rendered == used


def test_render_as_yaml_is_one_document_an_object(complete: tuple[Path, str]) -> None:
    printed = ftctl("render", "job.yaml", folder=complete[0]).stdout

    kinds = [document["kind"] for document in yaml.safe_load_all(printed)]
    assert kinds == ["File", "File", "Process"]
    assert printed.startswith("# backend local, attempt 1,")


def test_preview_marks_the_tokens_that_are_learned(complete: tuple[Path, str]) -> None:
    done = ftctl("preview", "job.yaml", "--rows", "2", folder=complete[0])

    assert done.returncode == 0, done.stderr
    assert re.search(r"\[\[0\..*\]\]", done.stdout)
    assert re.search(r"\[\[2\..*\]\]", done.stdout)
    assert "[[4." not in done.stdout
    assert "train: 24 rows" in done.stdout


@pytest.mark.full
def test_preview_shows_line_separators_of_unicode_and_names_unread_columns(tmp_path: Path) -> None:
    file = write_project(tmp_path)
    row = {"prompt": "a\u2028b\x85c", "completion": "d\u2029e", "id": 1, "chosen": ["d"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")

    done = ftctl("preview", file.name, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "[[d\u2029e" in done.stdout
    assert "columns that are not read: id, chosen\n" in done.stdout
    assert "train.jsonl: chosen in 1 of 1 rows is not read; move" in done.stdout


@pytest.mark.full
def test_preview_counts_the_rows_that_a_share_holds_out(tmp_path: Path) -> None:
    file = write_project(tmp_path, **{"dataset.evalSource": None, "dataset.evalShare": 0.3})

    done = ftctl("preview", file.name, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    found = re.search(r"evalShare 0.3 holds out (\d+) of 24 rows", done.stdout)
    assert found is not None, done.stdout
    assert f"eval: {found[1]} rows, " in done.stdout
    assert f"train: {24 - int(found[1])} rows, " in done.stdout


@pytest.mark.full
def test_preview_gives_the_trainers_own_sentence(tmp_path: Path) -> None:
    file = write_project(tmp_path)
    (tmp_path / "runs").touch()  # no run directory can be made, and none is needed
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')

    done = ftctl("preview", file.name, folder=tmp_path)

    assert "line 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_ctrl_c_stops_with_a_checkpoint_and_the_next_run_goes_on_from_it(tmp_path: Path) -> None:
    file = write_project(tmp_path, **{"training.maxSteps": ENDLESS, "checkpoint.keep": 1})
    with started("run", file.name, folder=tmp_path, PATH="/nowhere") as run:
        run.read_until(r"checkpoint of step \d+ committed")
        run.interrupt()
        code = run.wait()
    kept = re.search(r"the checkpoint of step (\d+) is saved", "\n".join(run.lines))

    assert code == 130
    assert kept is not None
    assert "Resume with: ftctl run job.yaml" in run.lines
    with started("run", file.name, folder=tmp_path, PATH="/nowhere") as again:
        again.read_until(rf"resumed from the checkpoint of step {kept[1]}$")
        again.interrupt()
        again.interrupt()
        assert again.wait() == 130
    with started("run", file.name, folder=tmp_path, PATH="/nowhere") as third:
        third.read_until(r"  (Res|S)tarting$")  # before the attempt has said anything
        third.interrupt()
        third.interrupt()
        assert third.wait() == 130
    assert re.search(r"Stopped .*; the checkpoint of step \d+ is saved", "\n".join(third.lines))


@pytest.mark.full
def test_a_reader_that_goes_away_is_told_what_becomes_of_the_job(tmp_path: Path) -> None:
    file = write_project(tmp_path, **{"training.maxSteps": ENDLESS, "checkpoint.keep": 1})
    words, again = ["run", file.name], "ftctl run job.yaml\n"
    there: dict[str, Any] = {"folder": tmp_path, "stderr": subprocess.PIPE}

    with ExitStack() as at_the_end, started(*words, **there) as unread:
        unread.read_until("  Training$")
        attempt = json.loads((tmp_path / "runs/default/tiny/attempts/1/node-0.json").read_text())
        at_the_end.callback(end_process, attempt["pid"])  # it would train for ever
        code, said = unread.leave()
        os.kill(attempt["pid"], 0)  # it trains on

        assert code == 141
        assert said.startswith("standard output is closed, so ftctl ends; job tiny continues")
        assert said.endswith(again)

        with started(*words, **there) as tee:
            tee.read_until(r"step \d+")
            tee.interrupt()  # Ctrl-C in `ftctl run FILE | tee log` ends tee, too
            code, said = tee.leave()

    assert code == 130
    assert "Traceback" not in said
    assert "the checkpoint of step" in said
    assert said.endswith(again)


def end_process(pid: int) -> None:
    """Kill a main process, whose ranks the kernel ends with it; gone already is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("validate job.yaml | true", 141, ""),
        ("logs tiny | true", 141, ""),
        ("render job.yaml >/dev/full", 1, "standard output cannot be written (No space left on"),
        ("--help >/dev/full", 1, "standard output cannot be written (No space left on"),
        ("logs tiny >&-", 0, ""),
        ("logs nothing 2>&-", 1, ""),
        ("validate nothing.yaml 2>/dev/full", 1, ""),
        ("logs " + "x" * 300, 1, "[Errno 36] File name too long"),
    ],
)
def test_no_output_that_is_closed_or_full_is_a_traceback(
    complete: tuple[Path, str], command: str, code: int, said: str
) -> None:
    script = f"{shlex.join(FTCTL)} {command}; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(
        ["bash", "-c", script],
        cwd=complete[0],
        env=environment(complete[0]),
        capture_output=True,
        text=True,
    )

    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(said)  # never a traceback


def test_a_locale_without_the_characters_of_a_name_gets_them_spelled(tmp_path: Path) -> None:
    folder, textless = tmp_path / "é", tmp_path / "é→\udcff"
    folder.mkdir()
    (folder / "j.yaml").write_text(yaml.safe_dump(manifest(**{"output.uri": "file://./ü"})))

    def said(*words: str, **variables: str) -> bytes:
        done = subprocess.run(
            [*FTCTL, *words], env={**os.environ, **variables}, capture_output=True, check=False
        )
        return done.stdout + done.stderr

    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    missing = said("logs", f"{textless}/x.yaml", **ascii_only)
    assert missing.startswith(os.fsencode(tmp_path) + b"/\\u00e9->\xff/x.yaml does not exist")
    missing = said("logs", f"{textless}/x.yaml", PYTHONIOENCODING="utf-8")
    assert missing.startswith(os.fsencode(f"{textless}/x.yaml does not exist"))
    rendered = list(yaml.safe_load_all(said("render", f"{folder}/j.yaml", **ascii_only)))
    assert "/ü" in json.dumps(rendered, ensure_ascii=False)


def test_a_job_suspended_by_its_manifest_says_what_to_change(tmp_path: Path) -> None:
    file = write_project(tmp_path, suspend=True)

    done = ftctl("run", file.name, folder=tmp_path)

    assert "spec.suspend is true; set it to false to resume" in done.stdout
    assert "there is no checkpoint yet" in done.stdout
    assert done.returncode == 130


@pytest.mark.full
def test_an_unreadable_run_directory_is_refused_and_left(
    complete: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(complete[0], folder)
    state = folder / "runs/default/tiny/job.json"
    state.write_text("{")

    refused = ftctl("run", "job.yaml", folder=folder)
    left = state.read_text()

    assert "job.json cannot be read as a job" in refused.stderr
    assert "start over with --fresh, which moves it aside" in refused.stderr
    assert (refused.returncode, left) == (1, "{")


@pytest.mark.full
def test_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    settings = {"training.maxSteps": ENDLESS, "deadlines.terminationGraceSeconds": 86_400}
    file = write_project(tmp_path, **settings)
    with started("run", file.name, folder=tmp_path) as run:
        run.read_until("  Training$")
        main = json.loads((tmp_path / "runs/default/tiny/attempts/1/node-0.json").read_text())
        os.kill(main["pid"], signal.SIGSTOP)  # else it may end before the second Ctrl-C comes
        run.interrupt()
        run.read_until("Ctrl-C again kills it")
        run.interrupt()
        code = run.wait()

    assert code == 130
    assert any("killing it now" in line for line in run.lines)


@pytest.mark.full
def test_a_terminal_gets_a_frame_and_the_complete_run_is_moved_aside(
    complete: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(complete[0], folder)
    main, side = pty.openpty()
    with subprocess.Popen(
        [*FTCTL, "run", "job.yaml"],
        cwd=folder,
        env={**environment(folder), "TERM": "xterm-256color", "COLUMNS": "100"},
        stdout=side,
        stderr=side,
        stdin=side,
    ) as process:
        os.close(side)
        shown = b"".join(iter(lambda: _read(main), b"")).decode()
    os.close(main)

    assert process.returncode == 0, shown
    assert "the earlier run is complete; moved it to" in shown
    assert (folder / "runs/default/tiny.1/output/adapter_config.json").is_file()
    assert (folder / "runs/default/tiny/output/adapter_config.json").is_file()
    assert "━" in shown
    # The cursor is hidden while the frame is drawn, and is back before the conclusion.
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") < shown.rindex("Complete after")


def _read(terminal: int) -> bytes:
    """Read what was shown; a terminal that nobody writes to any more is an error on Linux."""
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        pytest.param({"model.source": "file://./absent"}, "spec.model.source", id="no model"),
        pytest.param(
            {"dataset.source": "file://./absent.jsonl"}, "spec.dataset.source", id="no data"
        ),
        pytest.param(
            {"strategy.type": "fsdp", "topology.processesPerNode": 1},
            "spec.strategy.type",
            id="fsdp of one process",
        ),
        pytest.param(
            {
                "backend": {"type": "kubernetes"},
                "model.source": "hf://a/b",
                "dataset": {"source": "hf://a/c", "evalSource": "hf://a/d"},
            },
            "--backend local",
            id="other backend",
        ),
    ],
)
def test_run_refuses_before_anything_starts(
    tmp_path: Path, overrides: dict[str, Any], sentence: str
) -> None:
    file = write_project(tmp_path, **overrides)

    done = ftctl("run", file.name, folder=tmp_path)

    assert re.search(rf"job\.yaml:\d+: .*{re.escape(sentence)}", done.stderr)
    assert done.returncode == 1
    assert not (tmp_path / "runs").exists()


def test_a_refusal_names_the_line_of_the_field(tmp_path: Path) -> None:
    file = write_project(tmp_path, **{"model.source": "file://./nowhere"})

    done = ftctl("run", file.name, folder=tmp_path)

    line = file.read_text().splitlines().index("    source: file://./nowhere") + 1
    assert done.stderr.startswith(f"job.yaml:{line}: spec.model.source file://./nowhere: ")


def test_a_job_that_takes_over_cannot_start_afresh(tmp_path: Path) -> None:
    file = write_project(tmp_path, takeOver=True)

    done = ftctl("run", file.name, "--fresh", folder=tmp_path)

    assert re.search(r"job\.yaml:\d+: spec\.takeOver true .* leave out --fresh", done.stderr)
    assert done.returncode == 1
    assert not (tmp_path / "runs/default").exists()


@pytest.mark.parametrize("command", ["run", "preview", "render"])
def test_a_backend_that_nobody_installed_is_said_to_be_that(tmp_path: Path, command: str) -> None:
    file = write_project(tmp_path)

    done = ftctl(command, file.name, "--backend", "nope", folder=tmp_path)

    assert "nope is not installed (available: azureml, kubernetes, local)" in done.stderr
    assert done.returncode == 1


def test_run_on_this_machine_takes_the_place_of_another_backend(tmp_path: Path) -> None:
    file = write_project(tmp_path, backend={"type": "kubernetes"})

    done = ftctl("render", file.name, "--backend", "local", folder=tmp_path)

    assert done.stdout.startswith("# backend local")


@pytest.mark.full
def test_a_run_without_checkpoints_stops_without_one_and_begins_anew(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint.everySteps": None, "checkpoint.enabled": False}
    file = write_project(tmp_path, **settings, **{"training.maxSteps": ENDLESS})
    with started("run", file.name, folder=tmp_path) as run:
        run.read_until("  Training$")
        run.interrupt()
        run.read_until(r"stopping without a checkpoint \(spec.checkpoint.enabled\)")
        assert run.wait() == 130
    said = " ".join(" ".join(run.lines).split())
    assert (
        "there is no checkpoint (spec.checkpoint.enabled), so the next run starts at step 0" in said
    )
    ended = tmp_path / "runs/default/tiny/attempts/1/node-0.termination.json"
    termination = json.loads(ended.read_text())
    assert termination["exitCode"] == 75
    assert (
        "without a checkpoint, because spec.checkpoint.enabled is false" in termination["message"]
    )

    write_project(tmp_path, **settings)
    again = ftctl("run", file.name, folder=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming with attempt 2, from the first step: there is no checkpoint" in again.stdout
    assert "committed" not in again.stdout
    assert not list((tmp_path / "runs/default/tiny/checkpoints").glob("step-*"))
    progress = json.loads((tmp_path / "runs/default/tiny/progress.json").read_text())
    assert (progress["step"], progress.get("resumedStep")) == (4, None)
    assert "Complete" in again.stdout
