"""Mimetic attention and the language models by the real commands: what is trained, resumed, read and evaluated.

Every command says how often it initialised a model: once where a training starts, never where a checkpoint is read.
"""

import contextlib
import math
import random
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig

SCRIPT = Path(__file__).parent / "counted_initialisation.py"
NEVER = "mimetic 0, T-Fixup 0"
MIMETIC = "mimetic 1, T-Fixup 0"
TFIXUP = "mimetic 0, T-Fixup 1"
BOTH = "mimetic 1, T-Fixup 1"
ADAPTIVE = (
    *("--adaptive-input", "--adaptive-input-cutoff", "7,10", "--adaptive-input-factor", 2, "--tie-adaptive-weights"),
    *("--adaptive-softmax-cutoff", "7,10", "--adaptive-softmax-factor", 2, "--criterion", "adaptive_loss"),
    *("--ddp-backend", "legacy_ddp"),
)
TRANSLATION = {
    "transformer_mimetic": (("--position-scale", 2), MIMETIC),
    "transformer_tfixup": (("--mimetic-qk", "0,0.5", "--mimetic-vo", "0.2,0.2"), BOTH),
}
LANGUAGE = {
    "transformer_lm_mimetic_ptb": (("--word-dropout", 0.2, "--position-scale", 2, "--dropout", 0.1), MIMETIC),
    "transformer_lm_tfixup": ((*ADAPTIVE, "--word-dropout", 0.1), TFIXUP),
}
LONG = ("--max-update", 4, "--save-interval-updates", 2)


def model_of(directory):
    return torch.load(directory / "checkpoint_last.pt", weights_only=False)["model"]


def assert_same_weights(one, other):
    one, other = model_of(one), model_of(other)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def column(log, name):
    return [line[name] for line in log]


@pytest.fixture(scope="session")
def counted(run):
    """``counted(initialised, "train", *options)``: run the command, check what it initialised, return its output."""

    def run_once(initialised, name, *options, cwd=None):
        output = run(sys.executable, SCRIPT, name, *options, cwd=cwd)
        assert output.splitlines()[-1] == f"initialised: {initialised}"
        return output

    return run_once


# --- translation ---


@pytest.mark.parametrize("architecture", TRANSLATION)
def test_translation(architecture, counted, options, plugin_options, tmp_path, log_of):
    """Trained in one go, and again from the file of the second update, to the same bits; then read to translate."""
    more, initialised = TRANSLATION[architecture]
    more = (*more, *LONG, "--dropout", 0.1)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    log = log_of(counted(initialised, "train", *options(whole, architecture), *more), "train_inner")
    assert column(log, "num_updates") == [1, 2, 3, 4]
    file = ("--restore-file", whole / "checkpoint_1_2.pt")
    again = log_of(counted(NEVER, "train", *options(resumed, architecture), *more, *file), "train_inner")
    assert column(again, "loss") == column(log[2:], "loss")
    assert_same_weights(resumed, whole)
    output = counted(NEVER, "generate", *plugin_options(whole), "--beam", 2, "--max-len-b", 10)
    assert output.count("\nH-") == 40


# --- language models ---


@pytest.fixture(scope="session")
def text(shared_directory, once, run):
    """A binarised text of random letters, of which a is the most frequent, for language models.

    fairseq's adaptive_loss counts no second word of a later band, as it has the number of the padding within the band:
    these are e and h, which the validation text does without.
    """

    def make(directory):
        generator = random.Random(1)
        for split, lines, letters in (("train", 300, "abcdefghij"), ("valid", 30, "abcdfgij")):
            sentences = (generator.choices(letters, range(len(letters), 0, -1), k=7) for _ in range(lines))
            (directory / split).write_text("".join(" ".join(sentence) + "\n" for sentence in sentences))
        files = ("--trainpref", directory / "train", "--validpref", directory / "valid")
        run("fairseq-preprocess", "--only-source", *files, "--destdir", directory / "binary")

    return once(shared_directory / "letters", make) / "binary"


@pytest.fixture(scope="session")
def language_options(text, plugin):
    """``language_options(save_dir, architecture)``: what to give to fairseq-train."""

    def of(save_dir, architecture):
        return [
            *(text, "--user-dir", plugin, "--task", "language_modeling", "--cpu", "--num-workers", 0),
            *("--save-dir", save_dir, "--no-epoch-checkpoints", "--log-format", "json", "--log-interval", 1),
            *("--arch", architecture, "--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64),
            *("--decoder-attention-heads", 2, "--tokens-per-sample", 16, "--max-tokens", 200),
            *("--optimizer", "adam", "--lr", 1e-3, "--lr-scheduler", "fixed"),
        ]

    return of


@pytest.fixture(scope="module", params=LANGUAGE)
def language_model(request, shared_directory, once, counted, language_options):
    """A directory with four updates of a language model, saved every two; the output is in ``log``."""
    more, initialised = LANGUAGE[request.param]

    def make(directory):
        output = counted(initialised, "train", *language_options(directory, request.param), *more, *LONG)
        (directory / "log").write_text(output)

    return once(shared_directory / request.param, make)


def test_language_model_is_resumed_to_the_bit(language_model, counted, language_options, tmp_path, log_of):
    shutil.copy(language_model / "checkpoint_1_2.pt", tmp_path / "checkpoint_last.pt")
    more, _ = LANGUAGE[language_model.name]
    output = counted(NEVER, "train", *language_options(tmp_path, language_model.name), *more, *LONG)
    log = log_of((language_model / "log").read_text(), "train_inner")
    assert column(log, "num_updates") == [1, 2, 3, 4]
    assert column(log_of(output, "train_inner"), "loss") == column(log[2:], "loss")
    assert_same_weights(tmp_path, language_model)


def test_language_model_is_evaluated_with_the_loss_of_the_training_run(language_model, text, plugin, counted, log_of):
    output = counted(
        *(NEVER, "eval_lm", text, "--user-dir", plugin, "--cpu", "--gen-subset", "valid", "--max-tokens", 200),
        *("--path", language_model / "checkpoint_last.pt", "--tokens-per-sample", 16),
    )
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", output)[1])
    valid = log_of((language_model / "log").read_text(), "valid")
    assert loss == pytest.approx(valid[-1]["valid_loss"], abs=1.5e-3)


@pytest.mark.parametrize("language_model", ["transformer_lm_tfixup"], indirect=True)
def test_language_model_is_tuned_in_bfloat16(language_model, counted, language_options, tmp_path, log_of):
    tuning = ("--finetune-from-model", language_model / "checkpoint_last.pt", "--max-update", 2, "--bf16")
    more, _ = LANGUAGE[language_model.name]
    output = counted(NEVER, "train", *language_options(tmp_path, language_model.name), *more, *tuning)
    assert "loading pretrained model from" in output
    log = log_of(output, "train_inner")
    assert column(log, "num_updates") == [1, 2]
    assert all(map(math.isfinite, column(log, "loss")))


def test_gradinit_scales_a_language_model_of_t_fixup(counted, language_options, tmp_path, log_of):
    line = language_options(tmp_path, "transformer_lm_tfixup")
    line[line.index("language_modeling")] = "gradinit_language_modeling"
    output = counted(TFIXUP, "train", *line, *ADAPTIVE, "--gradinit-iterations", 4, "--max-update", 2)
    assert column(log_of(output, "gradinit"), "iteration") == [1, 2, 3, 4]
    assert column(log_of(output, "train_inner"), "num_updates") == [1, 2]


HYDRA = """
# @package _group_
common: {{user_dir: {plugin}, cpu: true, fp16: true, log_format: json, log_interval: 1}}
task: {{_name: language_modeling, data: {data}, tokens_per_sample: 16}}
dataset: {{max_tokens: 200, num_workers: 0}}
criterion: {{_name: cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{max_update: 2, lr: [0.001]}}
checkpoint: {{save_dir: {save_dir}, no_epoch_checkpoints: true}}
model: {{_name: transformer_lm_mimetic_ptb, decoder_layers: 1, mimetic_qk: '0,0.5', word_dropout: 0.1}}
"""


def test_hydra_trains_a_named_size_in_float16_and_resumes_it(text, plugin, counted, tmp_path, log_of):
    configuration = HYDRA.format(plugin=plugin, data=text, save_dir=tmp_path / "checkpoints")
    (tmp_path / "ours.yaml").write_text(configuration)
    line = ("hydra_train", "--config-dir", tmp_path, "--config-name", "ours")
    log = log_of(counted(MIMETIC, *line, cwd=tmp_path), "train_inner")
    assert column(log, "num_updates") == [1, 2]
    weights = model_of(tmp_path / "checkpoints")
    assert weights["decoder.embed_tokens.weight"].shape[1] == 384
    assert weights["decoder.layers.0.fc1.weight"].shape == (1536, 384)
    assert "decoder.layer_norm.weight" in weights
    log = log_of(counted(NEVER, *line, "optimization.max_update=4", cwd=tmp_path), "train_inner")
    assert column(log, "num_updates") == [3, 4]
    assert all(map(math.isfinite, column(log, "loss")))


# --- whether a checkpoint will be read ---


@pytest.mark.parametrize("files", [(), ("checkpoint_last.pt",), ("checkpoint_last-2.pt",), ("other.pt", "other-2.pt")])
@pytest.mark.parametrize("suffix", ["", "-2"])
@pytest.mark.parametrize("option", [{}, {"restore_file": "other.pt"}, {"finetune_from_model": "other.pt"}], ids=str)
def test_a_checkpoint_is_expected_where_fairseq_reads_one(files, suffix, option, plugin, tmp_path, monkeypatch):
    from user_dir import compat

    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).touch()
    cfg = CheckpointConfig(save_dir=str(tmp_path), checkpoint_suffix=suffix, **option)
    trainer = MagicMock(checkpoint_suffix=suffix, **{"load_checkpoint.return_value": None})
    with contextlib.suppress(ValueError):  # there is nothing to tune
        checkpoint_utils.load_checkpoint(cfg, trainer)
    read = trainer.load_checkpoint.call_args
    assert compat._finds_a_checkpoint(cfg) == (read is not None and Path(read.args[0]).is_file())
