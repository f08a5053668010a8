"""A training in a folder of its own: progress, failure, going on, one at a time. The training is a stand-in."""

import sys

import pytest
import training_run
from console import UserError

TRAINING = """
import json, pathlib, sys
run, updates = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with (run / "starts").open("a") as starts:
    starts.write("x")
if updates > 100:
    sys.exit("FloatingPointError: gradients are Nan/Inf")
with (run / "log.jsonl").open("a") as log:
    for update in range(1, updates + 1):
        print(json.dumps({"loss": f"{6 - update}", "lr": "0.001", "num_updates": f"{update}"}), file=log)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command that logs as fairseq-train does."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    monkeypatch.setattr(training_run, "executable", lambda name: sys.executable)
    return lambda run, updates: ["fairseq-train", str(script), str(run), str(updates)]


def test_a_run_gives_its_log_and_is_not_done_twice(command, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        log = training_run.train(command(run, 3), run, 3)
        assert log.losses("train") == ([1, 2, 3], [5, 4, 3])
    assert (run / "starts").read_text() == "x"


def test_a_failure_shows_the_end_of_the_output_and_the_next_call_tries_again(command, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(UserError, match=r"exit status 1(.|\n)*gradients are Nan/Inf"):
            training_run.train(command(run, 101), run, 101)
    assert (run / "starts").read_text() == "xx"


def test_a_folder_of_another_command_is_refused(command, tmp_path):
    run = tmp_path / "run"
    training_run.train(command(run, 3), run, 3)
    with pytest.raises(UserError, match="made by another command"):
        training_run.train(command(run, 4), run, 4)


def test_a_folder_in_use_is_refused(command, tmp_path):
    run = tmp_path / "run"
    with training_run.locked(run), pytest.raises(UserError, match="in use by another run"):
        training_run.train(command(run, 3), run, 3)


def test_a_half_written_line_waits_for_its_end(tmp_path):
    path = tmp_path / "log.jsonl"
    tail = training_run.LogTail(path)
    assert tail.read().train == {}
    path.write_text('{"loss": "1", "num_updates": "1"}\n{"loss": "2", "num_')
    assert list(tail.read().train) == [1]
    with path.open("a") as log:
        log.write('updates": "2"}\n')
    assert list(tail.read().train) == [1, 2]


def test_threads_are_few():
    assert 1 <= training_run.threads() <= training_run.MAX_THREADS
