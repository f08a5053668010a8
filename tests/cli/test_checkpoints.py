"""Checkpoints run no code, say what is wrong with them, and survive a kill at any point."""

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch


class Calls:
    """Pickles as a call of ``function``, with ``state`` set on what it returns."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.reduced


@pytest.fixture
def checkpoint(uninterrupted, tmp_path):
    """``checkpoint(**entries)``: the path of a trained checkpoint with some entries replaced."""

    def write(**entries):
        state = torch.load(uninterrupted / "checkpoint_last.pt", weights_only=False)
        torch.save(state | entries, tmp_path / "checkpoint_last.pt")
        return tmp_path / "checkpoint_last.pt"

    return write


@pytest.fixture
def load(plugin):
    from fairseq import checkpoint_utils

    return checkpoint_utils.load_checkpoint_to_cpu


@pytest.fixture
def loot(tmp_path):
    """A file that malicious checkpoints try to make."""
    return tmp_path / "loot"


def test_a_command_refuses_code_in_one_sentence(checkpoint, loot, plugin_options, run):
    file = checkpoint(task_state=Calls(os.system, f"touch {loot}"))
    output = run("fairseq-generate", *plugin_options(file.parent), fails=True)
    sentence = f"Checkpoint {file} asks for posix.system, which is not one of the plain types"
    assert sentence in output.splitlines()[-1]
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in output.splitlines()[-1]
    assert not loot.exists()


def forged_type(code):
    """A numpy.dtype whose flags deny that it holds objects."""
    return Calls(np.dtype, code, False, True, state=(3, "|", None, None, None, -1, -1, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda loot: Calls(eval, f"open({str(loot)!r}, 'w')"),
        lambda loot: Calls(open, str(loot), "w"),
        lambda loot: Calls(getattr, Calls(argparse.Namespace), "__class__"),
        lambda loot: Calls(subprocess.run, ["touch", str(loot)]),
        lambda loot: Calls(np._core.multiarray.scalar, forged_type("O"), b"A" * 8),
    ],
    ids=["eval", "open", "getattr", "subprocess", "forged"],
)
def test_refuses_any_function(make, checkpoint, loot, load):
    with pytest.raises(Exception, match="is not one of the plain types that fairseq writes") as refusal:
        load(str(checkpoint(task_state={"x": make(loot)})))
    assert type(refusal.value).__name__ == "CheckpointRefused"
    assert not loot.exists()


def test_refuses_code_in_an_option_that_fairseq_evaluates(uninterrupted, loot, plugin, reversal_data, checkpoint):
    from fairseq import checkpoint_utils

    args = torch.load(uninterrupted / "checkpoint_last.pt", weights_only=False)["cfg"]["model"]
    args = argparse.Namespace(**vars(args) | {"arch": "fconv", "encoder_layers": f"[open({str(loot)!r}, 'w')]"})
    args.data, args.source_lang, args.target_lang = str(reversal_data), "src", "tgt"
    with pytest.raises(ValueError, match="malformed node or string"):
        checkpoint_utils.load_model_ensemble([str(checkpoint(args=args, cfg=None))])
    assert not loot.exists()


def test_reads_numbers_of_numpy(checkpoint, load):
    numbers = {"array": np.arange(6.0).reshape(2, 3), "scalar": np.float64(2.5), "flag": np.bool_(True)}
    loaded = load(str(checkpoint(task_state=numbers)))["task_state"]
    np.testing.assert_equal(loaded, numbers)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint\n" * 99, None], ids=["empty", "text", "truncated"])
def test_says_that_a_file_is_damaged(content, checkpoint, load):
    file = checkpoint()
    file.write_bytes(file.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(
        RuntimeError, match=rf"Checkpoint {file} is truncated or damaged .*: delete it, or name another"
    ):
        load(str(file))


def test_a_model_knows_that_it_is_built_to_be_loaded(uninterrupted, plugin, monkeypatch):
    from fairseq import checkpoint_utils
    from fairseq.tasks.translation import TranslationTask

    from user_dir import compat

    seen, build = [], TranslationTask.build_model

    def build_model(self, cfg, from_checkpoint=False):
        seen.append(compat.built_to_be_loaded())
        return build(self, cfg, from_checkpoint)

    monkeypatch.setattr(TranslationTask, "build_model", build_model)
    checkpoint_utils.load_model_ensemble([str(uninterrupted / "checkpoint_last.pt")])
    assert seen == [True]
    assert not compat.built_to_be_loaded()


def assert_same_end(directory, output, uninterrupted, log_of):
    """The weights are the same to the last bit, so is the validation loss, and no temporary file is left."""
    states = [torch.load(path / "checkpoint_last.pt", weights_only=False) for path in (directory, uninterrupted)]
    for name, weight in states[1]["model"].items():
        assert torch.equal(states[0]["model"][name], weight), name
    assert states[0]["extra_state"]["val_loss"] == states[1]["extra_state"]["val_loss"]
    expected = log_of((uninterrupted / "log").read_text(), "valid")[-1]
    assert log_of(output, "valid")[-1]["valid_loss"] == expected["valid_loss"]
    assert not list(directory.glob("*.tmp"))


def test_survives_kills_while_checkpoints_are_written(uninterrupted, long_training, tmp_path, environment, run, log_of):
    for point, call in (("save", 2), ("copy", 2), ("copy", 3), ("rename", 3)):
        line = [sys.executable, Path(__file__).parent / "killed_training.py", point, call, *long_training(tmp_path)]
        killed = subprocess.run(list(map(str, line)), env=environment, capture_output=True, text=True, timeout=180)
        assert killed.returncode == -9, killed.stdout[-3000:] + killed.stderr[-3000:]
    output = run("fairseq-train", *long_training(tmp_path))
    assert_same_end(tmp_path, output, uninterrupted, log_of)


def test_survives_kills_at_random_points(uninterrupted, long_training, tmp_path, command, environment, run, log_of):
    generator = random.Random(7)
    for _ in range(3):
        line = command("fairseq-train", *long_training(tmp_path))
        with subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            updates = generator.randint(2, 9)
            for text in process.stdout:
                updates -= "train_inner" in text
                if updates == 0:
                    break
            process.kill()
    output = run("fairseq-train", *long_training(tmp_path))
    assert_same_end(tmp_path, output, uninterrupted, log_of)
