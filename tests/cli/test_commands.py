"""The real commands, on checkpoints of ours and of a stock architecture."""

import re
from collections import Counter

import pytest
import torch


def read(path):
    return torch.load(path, weights_only=False)


def test_fresh_training_starts_at_the_first_update_and_learns(trained, log_of):
    log = log_of((trained / "log").read_text(), "train_inner")
    assert [line["num_updates"] for line in log] == list(range(1, 11))
    assert log[-1]["loss"] < log[0]["loss"] - 0.3


def test_no_warning_is_repeated_in_training_validation_and_generation(trained):
    output = (trained / "log").read_text()
    warnings = Counter(re.findall(r"^\S+:\d+: \w*Warning: .*", output, re.MULTILINE))
    assert [text for text, count in warnings.items() if count > 1] == []
    assert "mismatched key_padding_mask" not in output


def test_resumes_from_the_last_checkpoint(resumable, train, log_of):
    output = train(resumable, "--max-update", 12, architecture=resumable.name)
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt \(epoch 2 @ 10 updates\)", output)
    assert [line["num_updates"] for line in log_of(output, "train_inner")] == [11, 12]
    assert read(resumable / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 12


def test_restores_another_file(trained, tmp_path, train, log_of):
    file = trained / "checkpoint_best.pt"
    output = train(tmp_path, "--restore-file", file, "--max-update", 11, architecture=trained.name)
    assert [line["num_updates"] for line in log_of(output, "train_inner")] == [11]


def test_finetunes_from_another_model(trained, tmp_path, train, log_of):
    file = trained / "checkpoint_last.pt"
    output = train(tmp_path, "--finetune-from-model", file, "--max-update", 2, architecture=trained.name)
    log = log_of(output, "train_inner")
    assert [line["num_updates"] for line in log] == [1, 2]
    assert log[0]["loss"] < log_of((trained / "log").read_text(), "train_inner")[0]["loss"] - 0.3


def test_validates_with_the_loss_of_the_training_run(trained, plugin_options, run, log_of):
    output = run("fairseq-validate", *plugin_options(trained), "--max-tokens", 500, "--log-format", "json")
    validated = log_of(output, "valid")[-1]["valid_loss" if "valid_loss" in output else "loss"]
    assert validated == pytest.approx(log_of((trained / "log").read_text(), "valid")[-1]["valid_loss"], abs=1.5e-3)


def test_generates(trained, plugin_options, run):
    output = run("fairseq-generate", *plugin_options(trained), "--beam", 3, "--max-len-b", 10)
    assert len(re.findall(r"^H-\d+\t", output, re.MULTILINE)) == 40
    assert "BLEU4 = " in output


def test_translates_interactively(trained, plugin_options, run):
    output = run("fairseq-interactive", *plugin_options(trained), "--max-len-b", 10, stdin="a b c\nd e f g\n")
    assert [int(number) for number in re.findall(r"^H-(\d)\t", output, re.MULTILINE)] == [0, 1]


def test_hydra_trains_and_its_checkpoint_generates(hydra, tmp_path, plugin_options, run, log_of):
    output = run("fairseq-hydra-train", *hydra, cwd=tmp_path)
    assert [line["num_updates"] for line in log_of(output, "train_inner")] == [1, 2, 3, 4]
    model = read(tmp_path / "checkpoints/checkpoint_last.pt")["model"]
    assert not any("layer_norm" in name for name in model)
    output = run("fairseq-generate", *plugin_options(tmp_path / "checkpoints"), "--max-len-b", 10)
    assert len(re.findall(r"^H-\d+\t", output, re.MULTILINE)) == 40


def test_hydra_under_torchrun_says_what_to_add_and_that_makes_it_one_training(hydra, tmp_path, torchrun, log_of):
    refused = torchrun("fairseq-hydra-train", *hydra, fails=True, cwd=tmp_path)
    keys = re.search(r"would train 2 separate models: add (.*)\.$", refused, re.MULTILINE)[1]
    output = torchrun("fairseq-hydra-train", *hydra, *keys.replace("'", "").split(), cwd=tmp_path)
    assert "training on 2 devices" in output
    assert [line["num_updates"] for line in log_of(output, "train_inner")] == [1, 2, 3, 4]


def test_log_file_holds_every_line_once(train, tmp_path):
    train(tmp_path, "--max-epoch", 3, "--log-file", tmp_path / "log")
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    assert len(lines) > 10
    assert len(set(lines)) == len(lines)
