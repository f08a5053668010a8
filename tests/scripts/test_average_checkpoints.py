"""Averages against arithmetic by hand, which files are chosen, and what is refused."""

import os
import re
import weakref
from pathlib import Path

import average_checkpoints
import pytest
import torch
from average_checkpoints import average
from console import UserError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def state_of(weights, **entries):
    """A checkpoint as fairseq writes it, optimiser included."""
    history = {"criterion_name": "C", "optimizer_name": "O", "lr_scheduler_state": {}, "num_updates": 7}
    state = {
        "args": None,
        "cfg": {"model": {"_name": "transformer"}, "task": {"_name": "translation"}},
        "model": weights,
        "optimizer_history": [history, history],
        "task_state": {},
        "extra_state": {"train_iterator": {"version": 2, "epoch": 3, "iterations_in_epoch": 4}, "val_loss": 1.0},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}},
    }
    return state | entries


@pytest.fixture
def save(tmp_path):
    """``save(name, weights, ...)``: write a checkpoint, return its path."""

    def write(name: str, weights: dict[str, torch.Tensor], **entries) -> Path:
        path = tmp_path / name
        torch.save(state_of(weights, **entries), path)
        return path

    return write


@pytest.fixture
def average_of(save):
    """``average_of([tensor, ...])``: their average, as it is in the file that is written."""

    def of(tensors):
        paths = [save(f"{index}.pt", {"w": tensor}) for index, tensor in enumerate(tensors)]
        out = paths[0].with_name("out.pt")
        average_checkpoints.write(average(paths), out)
        return average_checkpoints.load(out)["model"]["w"]

    return of


numbers = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5))
def test_the_average_is_the_mean_in_float64(average_of, rows):
    values = torch.tensor(rows, dtype=torch.float64)
    assert torch.equal(average_of(list(values)), values.sum(0) / len(rows))
    assert torch.equal(average_of(list(values.float())), (values.sum(0) / len(rows)).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_types_are_summed_in_a_large_one_and_kept(average_of, dtype):
    """A sum in float16 would overflow at the first place, and one in a small type lose every 1 at the second."""
    tensors = [torch.tensor([60000.0, 256.0], dtype=dtype)]
    tensors += [torch.tensor([60000.0, 1.0], dtype=dtype) for _ in range(7)]
    found = average_of(tensors)
    assert found.dtype == dtype
    expected = torch.stack(tensors).double().mean(0).to(dtype)
    assert torch.equal(found, expected)
    if dtype != torch.float32:
        summed = sum(tensors[1:], tensors[0]) / len(tensors)
        assert not torch.equal(summed, expected)


def test_what_is_no_average_is_the_last_ones(save):
    paths = [save(f"{n}.pt", {"w": torch.ones(2) * n, "steps": torch.tensor([n])}, task_state={"n": n}) for n in (3, 9)]
    state = average(paths)
    assert state["model"]["steps"].tolist() == [9]
    assert state["model"]["w"].tolist() == [6, 6]
    assert state["task_state"] == {"n": 9}
    assert state["cfg"]["model"] == {"_name": "transformer"}


def test_nothing_is_left_to_resume(save):
    state = average([save("a.pt", {"w": torch.ones(2)})])
    assert "last_optimizer_state" not in state
    assert state["extra_state"]["train_iterator"] == {"version": 2, "epoch": 1, "iterations_in_epoch": 0}
    assert "val_loss" not in state["extra_state"]
    assert [Path(name).name for name in state["extra_state"]["averaged"]] == ["a.pt"]
    assert len(state["optimizer_history"]) == 1  # fairseq reads no checkpoint without


def test_tied_weights_stay_one(save, tmp_path):
    paths = []
    for n in range(2):
        shared = torch.full((100, 100), float(n))
        paths.append(save(f"{n}.pt", {"in": shared, "out": shared, "apart": shared.clone()}))
    average_checkpoints.write(average(paths), tmp_path / "out.pt")
    weights = average_checkpoints.load(tmp_path / "out.pt")["model"]
    assert weights["in"].data_ptr() == weights["out"].data_ptr() != weights["apart"].data_ptr()
    assert all((weight == 0.5).all() for weight in weights.values())


def test_one_checkpoint_at_a_time_is_in_memory(save, monkeypatch):
    paths = [save(f"{n}.pt", {"w": torch.ones(2)}) for n in range(3)]
    load, loaded = average_checkpoints.load, []

    def counted(path):
        assert not any(weight() is not None for weight in loaded)
        state = load(path)
        loaded.append(weakref.ref(state["model"]["w"]))
        return state

    monkeypatch.setattr(average_checkpoints, "load", counted)
    average(paths)
    assert len(loaded) == 3


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"w": torch.ones(2)}, r"first\.pt has a parameter v and .*second\.pt has none"),
        (
            {"w": torch.ones(2), "v": torch.ones(2, 3), "u": torch.ones(1)},
            r"second\.pt has .* u and .*first\.pt has none",
        ),
        (
            {"w": torch.ones(2), "v": torch.ones(3, 2)},
            r"v is \(3, 2\) .* in .*second\.pt, but \(2, 3\) .* in .*first\.pt",
        ),
        (
            {"w": torch.ones(2), "v": torch.ones(2, 3).half()},
            r"v is .*float16 in .*second\.pt, but .*float32 in .*first",
        ),
        ({"w": torch.tensor([1, float("nan")]), "v": torch.ones(2, 3)}, r"second\.pt has NaN in w.* leave it out"),
    ],
    ids=["less", "more", "shape", "type", "NaN"],
)
def test_checkpoints_of_another_model_or_with_nan_are_refused(save, other, sentence):
    paths = [save("first.pt", {"w": torch.ones(2), "v": torch.ones(2, 3)}), save("second.pt", other)]
    with pytest.raises(UserError, match=sentence):
        average(paths)


class Touches:
    """Pickles as a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_checkpoint_that_would_run_code_is_refused(save, tmp_path):
    good = save("good.pt", {"w": torch.ones(2)})
    bad = save("bad.pt", {"w": torch.ones(2)}, task_state={"x": Touches(tmp_path / "loot")})
    with pytest.raises(UserError, match=r"bad\.pt asks for posix\.system"):
        average([good, bad])
    assert not (tmp_path / "loot").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "text.pt").write_bytes(b"text" * 100)
    torch.save({"w": torch.ones(2)}, tmp_path / "bare.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(state_of({"w": torch.ones(2)}) | {"model": None}, tmp_path / "empty.pt")
    with pytest.raises(UserError, match=r"text\.pt is truncated or damaged"):
        average([tmp_path / "text.pt"])
    for name in ("bare", "list", "empty"):
        with pytest.raises(UserError, match=rf"{name}\.pt is not a checkpoint that fairseq wrote"):
            average([tmp_path / f"{name}.pt"])


NAMES = (*(f"checkpoint{epoch}.pt" for epoch in (2, 9, 10, 11)), "checkpoint_last.pt", "checkpoint_best.pt")
UPDATES = ("checkpoint_1_900.pt", "checkpoint_2_1000.pt", "checkpoint_2_50.pt", "checkpoint.best_loss_2.100.pt")


@pytest.fixture
def folder(tmp_path):
    """A folder with the names of checkpoints of epochs, of updates, and others."""
    for name in (*NAMES, *UPDATES, "average.pt", "xcheckpoint9.pt", "checkpoint9.pt.tmp"):
        (tmp_path / name).touch()
    return tmp_path


def call(monkeypatch, *line):
    """The files that a command averages."""
    averaged = []
    monkeypatch.setattr(average_checkpoints, "average", lambda paths: averaged.extend(paths) or {})
    monkeypatch.setattr(average_checkpoints, "write", lambda state, out: None)
    monkeypatch.setattr("sys.argv", ["average_checkpoints.py", *map(str, line)])
    average_checkpoints.main()
    return [path.name for path in averaged]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (("--last", 3), ["checkpoint9.pt", "checkpoint10.pt", "checkpoint11.pt"]),
        (("--last-updates", 2), ["checkpoint_1_900.pt", "checkpoint_2_1000.pt"]),
        (("--epochs", "9-11"), ["checkpoint9.pt", "checkpoint10.pt", "checkpoint11.pt"]),
        (("--epochs", "10-10"), ["checkpoint10.pt"]),
    ],
)
def test_the_right_files_are_chosen(folder, monkeypatch, choice, names):
    assert call(monkeypatch, folder, *choice, "--out", folder / "out.pt") == names


def test_a_list_is_averaged_in_its_order(folder, monkeypatch):
    files = [folder / name for name in ("checkpoint11.pt", "checkpoint2.pt")]
    assert call(monkeypatch, *files, "--out", folder / "average.pt") == ["checkpoint11.pt", "checkpoint2.pt"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ((".", "--last", 5, "--out", "out.pt"), "has 4 checkpoints of epochs .* and 5 are to be averaged"),
        ((".", "--last-updates", 4, "--out", "out.pt"), "has 3 checkpoints of updates .* and 4 are"),
        ((".", "--epochs", "7-9", "--out", "out.pt"), r"has no checkpoint7\.pt"),
        ((".", "--out", "out.pt"), "is a folder; say which"),
        (("checkpoint9.pt", "--last", 2, "--out", "out.pt"), "choose from one folder"),
        ((".", ".", "--last", 2, "--out", "out.pt"), "choose from one folder"),
        (("checkpoint8.pt", "--out", "out.pt"), r"there is no file checkpoint8\.pt"),
        (("checkpoint9.pt", "--out", "checkpoint9.pt"), r"would overwrite checkpoint9\.pt"),
        (("checkpoint9.pt", "--out", "checkpoint_last.pt"), r"fairseq itself writes checkpoint_last\.pt"),
        (("checkpoint9.pt", "--out", "checkpoint12.pt"), r"fairseq itself writes checkpoint12\.pt"),
        (("checkpoint9.pt", "--out", "."), "is a folder; name a file"),
        ((".", "--epochs", "9", "--out", "out.pt"), "9 is no range of epochs"),
        ((".", "--last", "0", "--out", "out.pt"), "0 is no number of checkpoints"),
    ],
)
def test_what_cannot_be_averaged_is_said_in_a_sentence(folder, monkeypatch, capsys, line, sentence):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match=r"error: |2") as ended:
        call(monkeypatch, *line)
    said = f"{ended.value} {capsys.readouterr().err}"
    assert re.search(sentence, said), said


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "average.pt"
    out.write_text("before")

    def half(state, path):
        Path(path).write_text("half")
        raise RuntimeError("PytorchStreamWriter failed writing file: no space left")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(UserError, match=r"cannot write .*average\.pt: .*no space left"):
        average_checkpoints.write({}, out)
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["average.pt"]
