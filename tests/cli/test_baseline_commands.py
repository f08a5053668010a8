"""DeepNorm and Admin by the real commands: trained, resumed, tuned and read, by one process and by two."""

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "begun_training.py"
LONG = ("--max-update", 4, "--save-interval-updates", 2, "--dropout", 0.1, "--no-last-checkpoints")
PROFILED = "Admin: 10 residual branches profiled"


def omegas_of(weights):
    return {name: weight.detach() for name, weight in weights.items() if name.endswith("skip_weight")}


def model_of(file):
    return torch.load(file, weights_only=False)["model"]


def begun(directory, rank=0):
    """What a process began to train."""
    return torch.load(directory / f"{rank}.pt", weights_only=False)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("architecture", ["transformer_deepnorm", "transformer_admin"])
def test_translation(architecture, train, run, plugin_options, tmp_path):
    """Trained in one go, and again from the file of the second update, to the same bits; then tuned and read."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    profiled = architecture == "transformer_admin"
    assert (PROFILED in train(whole, *LONG, architecture=architecture)) == profiled
    resumed.mkdir()
    shutil.copy(whole / "checkpoint_1_2.pt", resumed / "checkpoint_last.pt")
    outputs = [train(resumed, *LONG, architecture=architecture)]
    last = model_of(whole / "checkpoint_1_4.pt")
    assert_equal(model_of(resumed / "checkpoint_1_4.pt"), last)
    for omega in omegas_of(last).values():
        assert (omega.shape, len(omega.unique()) > 1) == (((32,), True) if profiled else ((), False))

    shutil.copy(whole / "checkpoint_1_4.pt", whole / "checkpoint_last.pt")
    tuning = ("--finetune-from-model", whole / "checkpoint_last.pt", "--lr", 0, "--max-update", 1)
    outputs.append(train(tmp_path / "tuned", *tuning, architecture=architecture))
    assert_equal(model_of(tmp_path / "tuned/checkpoint_last.pt"), last)
    outputs.append(run("fairseq-generate", *plugin_options(whole), "--beam", 2, "--max-len-b", 10))
    assert outputs[-1].count("\nH-") == 40
    assert not any("residual branches profiled" in output for output in outputs)


def test_processes_of_different_arithmetic_begin_with_one_omega(run, options, torchrun, tmp_path):
    """That of the first, which is that of a training in one process."""
    line = (*options(tmp_path / "checkpoints", "transformer_admin"), "--max-update", 1, "--no-save")
    assert PROFILED in run(sys.executable, SCRIPT, tmp_path / "one", *line)
    torchrun(SCRIPT, tmp_path / "two", *line, "--distributed-backend", "gloo")
    one, first, second = begun(tmp_path / "one"), begun(tmp_path / "two"), begun(tmp_path / "two", rank=1)
    assert_equal(first["weights"], second["weights"])
    assert_equal(first["weights"], one["weights"])
    omegas = omegas_of(one["weights"])
    assert len(omegas) == 10
    assert sum(bool((omega > 1).all()) for omega in omegas.values()) == 8


def test_float32_copies_of_a_language_model_are_of_the_profiled_omegas(run, plugin, tmp_path):
    generator = random.Random(1)
    for split in ("train", "valid"):
        lines = (" ".join(generator.choices("abcdefghij", k=7)) for _ in range(100))
        (tmp_path / f"ptb.{split}.txt").write_text("".join(f" {line} \n" for line in lines))
    output = run(
        *(sys.executable, SCRIPT, tmp_path / "begun", tmp_path, "--user-dir", plugin, "--cpu", "--num-workers", 0),
        *("--task", "wikitext_language_modeling", "--preprocess-workers", 1, "--tokens-per-sample", 16),
        *("--arch", "transformer_lm_admin", "--decoder-layers", 2, "--decoder-embed-dim", 32),
        *("--decoder-ffn-embed-dim", 64, "--decoder-attention-heads", 2, "--max-tokens", 200, "--fp16"),
        *("--optimizer", "adam", "--lr", 1e-3, "--max-update", 2, "--no-save"),
    )
    assert "Admin: 4 residual branches profiled" in output
    start = begun(tmp_path / "begun")
    omegas, copies = omegas_of(start["weights"]), omegas_of(start["copies"])
    assert sum(bool((omega > 1).all()) for omega in omegas.values()) == 3
    assert all(copy.dtype == torch.float32 for copy in copies.values())
    assert_equal({name: omega.float() for name, omega in omegas.items()}, copies)
