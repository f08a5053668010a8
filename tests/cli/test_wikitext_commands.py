"""The task on text by the real commands: from a directory of text to the figures that papers report."""

import json
import random
import re
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "user_dir"
SIZES = {"layers": 1, "embed-dim": 16, "ffn-embed-dim": 32, "attention-heads": 2}
TASK = ("--user-dir", PLUGIN, "--task", "wikitext_language_modeling", "--tokens-per-sample", 32, "--cpu")
TRAINING = (
    *("--arch", "transformer_lm", *(word for name, size in SIZES.items() for word in (f"--decoder-{name}", size))),
    *("--optimizer", "adam", "--lr", 1e-2, "--max-tokens", 640, "--no-epoch-checkpoints", "--num-workers", 0),
    *("--log-format", "json", "--log-interval", 1),
)


def write_text(directory):
    """A text in which a word of 26 follows the one before it in the alphabet, most of the time."""
    directory.mkdir()
    generator = random.Random(1)
    for split, lines in (("train", 300), ("valid", 30), ("test", 20)):
        text = []
        for _ in range(lines):
            first, length = generator.randrange(26), generator.choice((0, 3, 15))
            letters = [chr(97 + (first + n) % 26) for n in range(length)]
            text.append(f" {' '.join(letter * generator.choice((1, 1, 3)) for letter in letters)} \n")
        (directory / f"ptb.{split}.txt").write_text("".join(text))
    return directory


def counts_of(directory, level):
    [path] = (directory / ".coldstart").glob(f"{level}-*/counts.json")
    return json.loads(path.read_text())


def perplexities_of(log):
    return [float(found) for found in re.findall(r"word perplexity (\S+)", log)]


@pytest.fixture(scope="module")
def trained(shared_directory, once, run):
    """A directory with the text in ``text``, a training on its words in ``words``, and its output in ``log``."""

    def make(directory):
        text = write_text(directory / "text")
        more = ("--valid-subset", "valid,test", "--best-checkpoint-metric", "word_ppl", "--max-update", 12)
        log = run("fairseq-train", text, *TASK, *TRAINING, *more, "--save-dir", directory / "words")
        (directory / "log").write_text(log)

    return once(shared_directory / "wikitext", make)


def test_by_words_the_perplexity_is_fairseqs_own(trained, log_of):
    log = (trained / "log").read_text()
    assert log.count("binarised in") == 1
    for tag, prefix in (("train_inner", ""), ("valid", "valid_"), ("test", "test_"), ("train", "train_")):
        lines = log_of(log, rf"INFO \| {tag}")
        assert lines
        for line in lines:
            assert line[f"{prefix}word_ppl"] == line[f"{prefix}ppl"] > 1
            assert f"{prefix}bpc" not in line
    best = log_of(log, "valid")[-1]["valid_word_ppl"]
    assert f"score {best:g})" in log


def test_eval_lm_agrees_with_the_validation(trained, run, log_of):
    """On the text as it was in training, binarised no second time; a context helps."""
    logged = log_of((trained / "log").read_text(), "test")[-1]
    evaluation = ("--path", trained / "words/checkpoint_last.pt", "--gen-subset", "test")
    plain = run("fairseq-eval-lm", trained / "text", *TASK, *evaluation)
    assert "binarising" not in plain
    assert perplexities_of(plain) == [pytest.approx(logged["test_word_ppl"], abs=0.011)]
    assert f"Perplexity: {perplexities_of(plain)[0]:.2f}" in plain
    with_context = run("fairseq-eval-lm", trained / "text", *TASK, *evaluation, "--context-window", 24)
    assert perplexities_of(with_context)[0] < perplexities_of(plain)[0]
    assert "not comparable" not in plain + with_context


def test_characters_after_gradinit(trained, tmp_path, run, log_of):
    line = ["fairseq-train", trained / "text", *TASK, *TRAINING, "--level", "char", "--gradinit-iterations", 2]
    line[line.index("wikitext_language_modeling")] = "gradinit_wikitext_language_modeling"
    output = run(*line, "--max-update", 2, "--save-dir", tmp_path / "checkpoints")
    assert "GradInit: 2 iterations for adam" in output
    counts = counts_of(trained / "text", "char")["valid"]
    [logged] = log_of(output, "valid")
    assert logged["valid_bpc"] == logged["valid_loss"]
    expected = 2 ** (logged["valid_loss"] * counts["characters"] / counts["words"])
    assert logged["valid_word_ppl"] == pytest.approx(expected, rel=0.01)
    validation = ("--path", tmp_path / "checkpoints/checkpoint_last.pt", "--max-tokens", 640)
    output = run("fairseq-validate", trained / "text", *TASK, *validation)
    assert f"| word_ppl {logged['valid_word_ppl']:g} | bpc {logged['valid_bpc']:g} |" in output


# The model's options refer to those of the task, of which Hydra knows no defaults before the plugin is imported.
HYDRA = """
# @package _group_
common: {{user_dir: {plugin}, cpu: true, log_format: json, log_interval: 1}}
task:
  _name: wikitext_language_modeling
  data: {data}
  level: sentencepiece
  sentencepiece_vocab_size: 310
  cache_dir: {cache}
  tokens_per_sample: 32
  add_bos_token: false
  max_target_positions: null
dataset: {{max_tokens: 640, num_workers: 0}}
criterion: {{_name: cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{max_update: 2, lr: [0.01]}}
checkpoint: {{no_save: true}}
model: {{_name: transformer_lm, decoder_layers: 1, decoder_embed_dim: 16, decoder_attention_heads: 2}}
"""


def test_hydra_configures_it(trained, tmp_path, run, log_of):
    text = HYDRA.format(plugin=PLUGIN, data=trained / "text", cache=tmp_path / "cache")
    (tmp_path / "ours.yaml").write_text(text)
    output = run("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "ours", cwd=tmp_path)
    [logged] = log_of(output, "valid")
    assert logged["valid_word_ppl"] > logged["valid_ppl"]
    assert [path.name[:14] for path in sorted((tmp_path / "cache").iterdir())] == ["lock", "sentencepiece-"]


def test_a_wrong_directory_is_refused_in_one_sentence(trained, run):
    output = run("fairseq-train", trained, *TASK, *TRAINING, fails=True)
    assert re.search(r"\nValueError: .*/wikitext\S* holds no text of a known name: expected wiki.*\n$", output)
