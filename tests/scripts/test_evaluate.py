"""Scores against sacreBLEU called directly, on translations of a small real training and on made ones."""

import importlib.util
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import average_checkpoints
import evaluate
import pytest
from console import UserError

sacrebleu = pytest.importorskip("sacrebleu")

WORDS = ("the", "cat", "dog", "sees", "house", "well-known", "rich-text")
PIECES = {"house": "hou@@ se", "well-known": "well@@ -known", "rich-text": "rich-@@ text"}
SENTENCES = {"train": 400, "valid": 10, "test": 30}
SIZES = {"layers": 1, "embed-dim": 32, "ffn-embed-dim": 64, "attention-heads": 2}
TRAINING = (
    *("--user-dir", Path(__file__).parents[2] / "user_dir", "--arch", "transformer_tfixup", "--share-all-embeddings"),
    *(word for name, size in SIZES.items() for side in ("encoder", "decoder") for word in (f"--{side}-{name}", size)),
    *("--optimizer", "adam", "--lr", 1e-2, "--lr-scheduler", "inverse_sqrt_nowarmup", "--decay-period", 4000),
    *("--criterion", "cross_entropy", "--dropout", 0, "--max-tokens", 300, "--max-epoch", 6, "--cpu"),
    *("--num-workers", 0, "--disable-validation", "--no-last-checkpoints"),
)


def write_texts(folder, run):
    """Sentences to copy: ``SPLIT.raw``, ``SPLIT.tok`` and, in pieces of words, the data set ``bin``."""
    generator = random.Random(1)
    for split, count in SENTENCES.items():
        lines = [generator.choices(WORDS, k=generator.randint(2, 9)) for _ in range(count)]
        pieces = "".join(f"{' '.join(PIECES.get(word, word) for word in line)} .\n" for line in lines)
        for side in ("src", "tgt"):
            (folder / f"{split}.{side}").write_text(pieces)
        (folder / f"{split}.tok").write_text("".join(f"{' '.join(line)} .\n" for line in lines))
        (folder / f"{split}.raw").write_text("".join(f"{' '.join(line)}.\n" for line in lines))
    prefixes = (word for split in SENTENCES for word in (f"--{split}pref", folder / split))
    languages = ("--source-lang", "src", "--target-lang", "tgt", "--joined-dictionary")
    run("fairseq-preprocess", *languages, *prefixes, "--destdir", folder / "bin")


@pytest.fixture(scope="session")
def data(shared_directory, once, run):
    """A directory with ``test.raw``, ``test.tok``, and the data set ``bin``."""
    return once(shared_directory / "copies", lambda folder: write_texts(folder, run))


@pytest.fixture(scope="session")
def trained(data, shared_directory, once, run):
    """A directory with ``checkpoint1.pt`` to ``checkpoint6.pt``."""
    return once(
        shared_directory / "copier", lambda folder: run("fairseq-train", data / "bin", *TRAINING, "--save-dir", folder)
    )


@pytest.fixture
def call(data, tmp_path, monkeypatch, capsys):
    """``call(*more options, path=...)``: run the command, return ``scores.json`` and what it printed."""

    def run_main(*more, path):
        out = tmp_path / "out"
        line = (data / "bin", "--path", path, "--references", data / "test.raw", "--out", out, *more)
        monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, line)])
        monkeypatch.setattr(evaluate, "exit_on_sigterm", lambda: None)
        evaluate.main()
        return json.loads((out / "scores.json").read_text()), capsys.readouterr().out

    return run_main


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def generated(out, prefix):
    """The hypotheses in fairseq's output, by an own reading."""
    lines = [line.split("\t") for line in lines_of(out / "generate-test.txt") if line.startswith(f"{prefix}-")]
    return [text for _, _, text in sorted(lines, key=lambda line: int(line[0][2:]))]


def test_average_generate_score(trained, data, tmp_path, call):
    average_checkpoints.write(
        average_checkpoints.average(average_checkpoints.epochs(trained, 5, 6)), tmp_path / "average.pt"
    )
    options = ("--remove-bpe", "--beam", 2, "--tokenized-references", data / "test.tok", "--compound-split")
    note, printed = call(*options, path=tmp_path / "average.pt")
    hypotheses, words, raw, tokens = map(
        lines_of,
        (tmp_path / "out/hypotheses.txt", tmp_path / "out/hypotheses.tok.txt", data / "test.raw", data / "test.tok"),
    )
    assert hypotheses == generated(tmp_path / "out", "D")
    assert words == generated(tmp_path / "out", "H")
    assert len(hypotheses) == 30
    assert "@@" not in " ".join(hypotheses)
    bleu, chrf, tokenised, compounds = note["scores"]
    assert bleu["score"] == sacrebleu.corpus_bleu(hypotheses, [raw]).score > 10  # it has learned something
    assert chrf["score"] == sacrebleu.corpus_chrf(hypotheses, [raw]).score
    assert tokenised["score"] == sacrebleu.corpus_bleu(words, [tokens], tokenize="none", force=True).score
    split = [[line.replace("l-k", "l ##AT##-##AT## k").replace("h-t", "h ##AT##-##AT## t") for line in lines]
             for lines in (words, tokens)]  # fmt: skip
    assert compounds["score"] == sacrebleu.corpus_bleu(split[0], [split[1]], tokenize="none", force=True).score
    assert [each["signature"].split("|")[3] for each in note["scores"]] == ["tok:13a", "nc:6", "tok:none", "tok:none"]
    for each in note["scores"]:
        assert f"{each['name']} {each['score']:.2f} ({each['signature']})" in printed


def test_an_ensemble_of_two(trained, tmp_path, call):
    """And the detokeniser, where it is installed."""
    moses = importlib.util.find_spec("sacremoses") is not None
    both = f"{trained / 'checkpoint5.pt'}:{trained / 'checkpoint6.pt'}"
    call("--remove-bpe", *(["--tokenizer", "moses"] if moses else []), path=both)
    output = (tmp_path / "out/generate-test.txt").read_text() + (tmp_path / "out/generate.out").read_text()
    assert f"loading model(s) from {both}" in output
    hypotheses = lines_of(tmp_path / "out/hypotheses.txt")
    assert len(hypotheses) == 30
    assert any(line.endswith(" .") for line in hypotheses) != moses
    assert not (tmp_path / "out/hypotheses.tok.txt").exists()


@pytest.fixture
def model(tmp_path):
    """A file that stands for a checkpoint."""
    path = tmp_path / "model.pt"
    path.write_text("weights")
    return path


@pytest.fixture
def fake(monkeypatch):
    """``fake(hypotheses)``: fairseq-generate gives these, in another order; returns the commands that were run."""
    commands = []

    def install(hypotheses):
        def generate(command, out, split, lock):
            commands.append(command)
            numbered = [f"S-{n}\tx\nH-{n}\t-1\t{text}\nD-{n}\t-1\t{text}\n" for n, text in enumerate(hypotheses)]
            random.Random(2).shuffle(numbered)
            (out / "generate-test.txt").write_text("".join(numbered), encoding="utf-8")

        monkeypatch.setattr(evaluate, "generate", generate)
        return commands

    return install


def test_the_order_is_that_of_the_test_set(fake, call, model, data, tmp_path):
    fake(lines_of(data / "test.raw"))
    note, _ = call("--remove-bpe", path=model)
    assert (tmp_path / "out/hypotheses.txt").read_text() == (data / "test.raw").read_text()
    assert [round(each["score"], 9) for each in note["scores"]] == [100, 100]


def test_the_command_has_every_sentence_and_the_options(fake, call, model, data):
    commands = fake(lines_of(data / "test.raw"))
    call("--remove-bpe", "--lenpen", 0.3, "--beam=4", path=model)
    [command] = commands
    assert command[-1] == "--required-batch-size-multiple=1"
    assert "--source-lang=src --target-lang=tgt" in " ".join(command)
    assert "--remove-bpe --lenpen 0.3 --beam=4" in " ".join(command)


def test_nothing_is_translated_twice_unless_a_checkpoint_changes(fake, call, model, data):
    commands = fake(lines_of(data / "test.raw"))
    for _ in range(2):
        call("--remove-bpe", path=model)
        call("--remove-bpe", "--lowercase", path=model)  # other scores of the same translations
    assert len(commands) == 1
    model.write_text("other weights")
    _, printed = call("--remove-bpe", path=model)
    assert "have changed: translating again" in printed
    assert len(commands) == 2
    with pytest.raises(SystemExit, match="was made by another command"):
        call("--remove-bpe", "--beam=9", path=model)
    assert len(commands) == 2


def test_incomplete_translations_are_made_again(fake, call, model, data):
    commands = fake(lines_of(data / "test.raw")[:-1])
    with pytest.raises(SystemExit, match=r"29 hypotheses and .*bin 30"):
        call("--remove-bpe", path=model)
    fake(lines_of(data / "test.raw"))
    call("--remove-bpe", path=model)
    assert len(commands) == 2


def test_a_failed_translation_is_said_and_made_again(call, model, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "executable", lambda name: shutil.which("false"))
    with pytest.raises(SystemExit, match="fairseq-generate ended with exit status 1"):
        call("--remove-bpe", path=model)
    assert not (tmp_path / "out/generated.json").exists()


def test_case_is_ignored_on_request(fake, call, model, data):
    fake([line.upper() for line in lines_of(data / "test.raw")])
    assert call("--remove-bpe", path=model)[0]["scores"][0]["score"] < 50
    note, _ = call("--remove-bpe", "--lowercase", path=model)
    assert [round(each["score"], 9) for each in note["scores"]] == [100, 100]
    assert all("case:lc" in each["signature"] for each in note["scores"])


def test_a_system_does_not_differ_from_itself(fake, call, model, data, tmp_path):
    fake([line.replace("cat", "dog") for line in lines_of(data / "test.raw")])
    call("--remove-bpe", path=model)
    shutil.copy(tmp_path / "out/hypotheses.txt", tmp_path / "other.txt")
    note, printed = call("--remove-bpe", "--against", tmp_path / "other.txt", path=model)
    assert [each["p_value"] for each in note["comparisons"]] == [1, 1]
    assert printed.count("+0.00: not significant at 0.05") == 2


def test_a_worse_system_differs(fake, call, model, data, tmp_path):
    raw = lines_of(data / "test.raw")
    other = [line.replace("cat", "dog").replace("the", "a") for line in raw]
    (tmp_path / "other.txt").write_text("".join(f"{line}\n" for line in other))
    fake(raw)
    note, printed = call("--remove-bpe", "--against", tmp_path / "other.txt", path=model)
    bleu, chrf = note["comparisons"]
    assert (bleu["name"], chrf["name"]) == ("BLEU", "chrF")
    assert bleu["other"] == sacrebleu.corpus_bleu(other, [raw]).score
    assert bleu["score"] == note["scores"][0]["score"] > bleu["other"]
    assert bleu["p_value"] == 1 / 1001
    assert "bs:1000|seed:12345" in bleu["signature"]
    assert printed.count(": significant at 0.05") == 2


def test_a_small_difference_is_none():
    references = [f"a sentence number {n} of the test set" for n in range(60)]
    ours = [line.replace("number", "numeral") if n % 6 == 0 else line for n, line in enumerate(references)]
    other = [line.replace("number", "numeral") if n % 6 == 1 or n == 8 else line for n, line in enumerate(references)]
    found, _ = evaluate.compare(ours, other, references, evaluate.detokenised_metrics(lowercase=False))
    assert found.score > found.other
    assert found.p_value > 0.2


EXAMPLES = {
    "rich-text format": "rich ##AT##-##AT## text format",
    "Aix-en-Provence": "Aix ##AT##-##AT## en ##AT##-##AT## Provence",
    "a-b-c": "a ##AT##-##AT## b-c",
    "a-ä-c": "a ##AT##-##AT## ä ##AT##-##AT## c",
    "Öl-Übung": "Öl ##AT##-##AT## Übung",
    "one - two -three four- --": "one - two -three four- --",
    "rich @-@ text": "rich @ ##AT##-##AT## @ text",
    "2010--2011": "2010 ##AT##-##AT## -2011",
}


@pytest.mark.parametrize(("line", "expected"), EXAMPLES.items())
def test_compounds_are_split(line, expected):
    assert evaluate.split_compounds(line) == expected


@pytest.mark.skipif(not shutil.which("perl"), reason="needs perl")
def test_compounds_are_split_as_perl_does():
    lines = "".join(f"{line}\n" for line in (*EXAMPLES, "no-\u00a0-break", "x-\u2028-y", "---", "日-本-語"))
    command = ["perl", "-ple", r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"]
    done = subprocess.run(command, input=lines.encode(), stdout=subprocess.PIPE, check=True)
    assert "".join(f"{evaluate.split_compounds(line)}\n" for line in lines[:-1].split("\n")) == done.stdout.decode()


def test_pieces_become_words():
    assert evaluate.join_pieces(["▁Ein ▁Ha us ▁."], "sentencepiece") == ["Ein Haus ."]
    assert evaluate.join_pieces(["ein hau@@ s ."], "subword_nmt") == ["ein haus ."]
    assert evaluate.join_pieces(["ein hau@@ s ."], None) == ["ein hau@@ s ."]


@pytest.mark.parametrize("option", ["--references", "--tokenized-references", "--against"])
def test_texts_of_another_length_are_refused_before_work(option, call, model, data, tmp_path):
    (tmp_path / "short.txt").write_text("one line\n")
    with pytest.raises(SystemExit) as ended:
        call("--remove-bpe", option, tmp_path / "short.txt", path=model)
    expected = f"{tmp_path / 'short.txt'} has 1 lines, and test in {data / 'bin'} 30 sentences"
    assert str(ended.value).startswith(f"error: {expected}")
    assert not (tmp_path / "out").exists()


def test_pieces_that_nothing_joins_are_refused_before_work(call, model, tmp_path):
    with pytest.raises(SystemExit, match=r"has pieces of words \(@@\); add --post-process=subword_nmt"):
        call(path=model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--gen-subset", "test1"), r"has 0 data sets test1\.SOURCE-TARGET that fit \(none\)"),
        (("--source-lang", "de"), "has 0 data sets test"),
        (("--compound-split",), "needs --tokenized-references"),
        (("--bpe", "gpt2", "--tokenized-references", __file__), "words cannot be told in --bpe=gpt2"),
        (("--against", "no.txt"), r"there is no file no\.txt"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(call, model, capsys, options, sentence):
    with pytest.raises(SystemExit) as ended:
        call("--remove-bpe", *options, path=model)
    assert re.search(sentence, f"{ended.value} {capsys.readouterr().err}")


def test_a_missing_checkpoint_of_an_ensemble_is_refused(call, model, capsys):
    with pytest.raises(SystemExit):
        call("--remove-bpe", path=f"{model}:missing.pt")
    assert "there is no file missing.pt" in capsys.readouterr().err


def test_two_pairs_of_languages_need_a_choice(data, tmp_path):
    folder = tmp_path / "both"
    shutil.copytree(data / "bin", folder)
    for end in ("bin", "idx"):
        for side in ("src", "tgt"):
            shutil.copy(folder / f"test.src-tgt.{side}.{end}", folder / f"test.tgt-src.{side}.{end}")
    with pytest.raises(UserError, match=r"has 2 data sets test\.SOURCE-TARGET that fit \(src-tgt, tgt-src\)"):
        evaluate.find_split(folder, "test", None, None)
    split = evaluate.find_split(folder, "test", "tgt", None)
    assert (split.source, split.target, split.sentences) == ("tgt", "src", 30)
