"""The task on text, in this process: what is read and counted, the cache, and the perplexities that follow."""

import logging
import math
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import time

import pytest
import torch
from fairseq import options, tasks
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

TRAIN = " \n = The cat = \n \n the cat sat on the mat , naïve @-@ <unk> \n the dog <unk> sat \n" * 12
VALID = " the cat sat \n \n the <unk> \n on the mat\n"  # every word is in TRAIN
TEST = " the dog sat on <unk> \n = The mat = \n"
VALID_COUNTS = {"lines": 4, "words": 3 + 0 + 2 + 3 + 4, "characters": 11 + 0 + 9 + 10 + 4}
TEST_COUNTS = {"lines": 2, "words": 5 + 4 + 2, "characters": 20 + 11 + 2}
# Ends of lines of three systems, blanks of many kinds, words that fairseq's dictionary reserves, no end of line at the
# end, and in TRICKY_VALID words that are not in TRICKY.
TRICKY = "a  b\tc\n\n d\u00a0e \r\n</s> f <pad> <s>\ra b 日本 ï\u2028g\x1ch <unk>\n" * 7 + "b a b\n\n" + "c a"
TRICKY_VALID = "a x\ny b z\n<unk> \u2581\n"
SPLITS = ("train", "valid", "test")
VOCAB_SIZE = 280
SENTENCEPIECE = ("--level", "sentencepiece", "--sentencepiece-vocab-size", VOCAB_SIZE)
SMALL = (
    "--decoder-layers",
    1,
    "--decoder-embed-dim",
    16,
    "--decoder-ffn-embed-dim",
    16,
    "--decoder-attention-heads",
    2,
)


@pytest.fixture(scope="module")
def corpus(plugin):
    from user_dir import corpus

    return corpus


def write(directory, train=TRAIN, valid=VALID, test=TEST, names="wiki.{}.tokens"):
    directory.mkdir(exist_ok=True)
    for split, text in zip(SPLITS, (train, valid, test), strict=True):
        if text is not None:
            (directory / names.format(split)).write_bytes(text.encode())
    return directory


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text")


@pytest.fixture
def make(corpus, tmp_path):
    """``make(directory, level=..., workers=..., cache_dir=...)``: the directory of the binarised text."""

    def binarise(directory, level="word", vocab_size=None, workers=1, cache_dir=tmp_path / "cache"):
        settings = corpus.Settings(level, vocab_size)
        return corpus.binarised(corpus.find_text(directory), settings, cache_dir, workers)

    return binarise


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def lines_of(directory, split):
    """The tokens of every line of a binarised split."""
    dictionary = Dictionary.load(str(directory / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(directory / split), dictionary)
    return [[dictionary[number] for number in line] for line in lines]


@pytest.mark.parametrize("names", ["wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.txt"])
def test_it_knows_the_files_of_the_data_sets(names, corpus, tmp_path):
    directory = write(tmp_path / "text", names=names)
    (directory / "README.txt").touch()
    assert corpus.find_text(directory) == {split: directory / names.format(split) for split in SPLITS}
    (directory / names.format("test")).unlink()
    assert list(corpus.find_text(directory)) == ["train", "valid"]


def spoil(directory, how):
    valid = directory / "wiki.valid.tokens"
    if how == "nothing":
        for path in directory.iterdir():
            path.unlink()
    elif how == "binary":
        spoil(directory, "nothing")
        (directory / "dict.txt").touch()
    elif how == "directory":
        return directory / "elsewhere"
    elif how == "file":
        return valid
    elif how == "two":
        write(directory, names="ptb.{}.txt")
    elif how == "missing":
        valid.unlink()
    else:
        valid.write_text({"empty": "", "blank": " \n\n"}[how])
    return directory


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("directory", r"elsewhere is no directory: name the one that holds wiki\.\{train,valid,test\}\.tokens, .*txt"),
        ("file", r"wiki\.valid\.tokens is no directory"),
        ("nothing", r"text holds no text of a known name: expected wiki\.\{train,valid,test\}\.tokens, "),
        ("binary", r"text holds binarised text \(dict\.txt\), not text: use --task language_modeling"),
        ("two", r"more than one data set \(wiki\.train\.tokens and ptb\.train\.txt\): give each a directory"),
        ("missing", r"text lacks wiki\.valid\.tokens, but holds wiki\.train\.tokens, wiki\.test\.tokens"),
        ("empty", r"wiki\.valid\.tokens is empty"),
        ("blank", r"wiki\.valid\.tokens is empty"),
    ],
)
def test_a_wrong_directory_is_refused_in_one_sentence(how, sentence, corpus, text):
    with pytest.raises(ValueError, match=sentence) as error:
        corpus.find_text(spoil(text, how))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def tricky(shared_directory, once, run):
    """A directory with text in ``text`` and what fairseq-preprocess makes of it in ``binary``."""

    def preprocess(directory):
        text = write(directory / "text", TRICKY, TRICKY_VALID, TRICKY, names="{}.txt")
        prefixes = [word for split in SPLITS for word in (f"--{split}pref", text / f"{split}.txt")]
        run("fairseq-preprocess", "--only-source", *prefixes, "--destdir", directory / "binary", "--workers", 2)

    return once(shared_directory / "tricky", preprocess)


@pytest.mark.parametrize(("workers", "piece"), [(1, 1 << 20), (1, 40), (2, 40)])
def test_words_are_binarised_as_by_fairseq_preprocess(workers, piece, tricky, make, corpus, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", piece)
    ours, theirs = content(make(tricky / "text", workers=workers)), content(tricky / "binary")
    del ours["counts.json"], theirs["preprocess.log"]
    assert ours == theirs


def test_unknown_words_are_counted(tricky, make, corpus):
    assert corpus.counts_of(make(tricky / "text"))["valid"] == corpus.Counts(3, 5 + 2 + 3, 3 + 5 + 7 + 3, 10, 4)


@pytest.mark.parametrize("level", ["word", "char", "sentencepiece"])
def test_counts_are_those_made_by_hand(level, text, make, corpus):
    directory = make(text, level, VOCAB_SIZE if level == "sentencepiece" else None)
    counts = corpus.counts_of(directory)
    for split, expected in (("valid", VALID_COUNTS), ("test", TEST_COUNTS)):
        assert expected.items() <= vars(counts[split]).items()
        assert counts[split].tokens == sum(map(len, lines_of(directory, split)))
        assert counts[split].unknown == 0
    if level != "sentencepiece":
        assert counts["valid"].tokens == VALID_COUNTS["words" if level == "word" else "characters"]


def test_characters_are_spelled_out(text, make):
    lines = lines_of(make(text, "char"), "valid")
    assert lines == [
        [*line, "</s>"] for line in ("the\u2581cat\u2581sat", "", "the\u2581<unk>", "on\u2581the\u2581mat")
    ]


def test_sentencepiece_loses_nothing(tmp_path, make, corpus):
    words = ["the", "cat", "☃", "ﬁ", "½", "<unk>", "@-@", "naïve"]
    text = write(tmp_path / "text", TRAIN, f"{' '.join(words)}\n\n")
    directory = make(text, "sentencepiece", VOCAB_SIZE)
    [pieces, blank] = lines_of(directory, "valid")
    processor = corpus.import_sentencepiece().SentencePieceProcessor(model_file=str(directory / "sentencepiece.model"))
    assert processor.decode_pieces(pieces[:-1]).split() == words
    assert blank == ["</s>"]
    assert corpus.counts_of(directory)["valid"].unknown == 0


def test_sentencepiece_is_the_same_everywhere(text, make, corpus, tmp_path, monkeypatch):
    one = make(text, "sentencepiece", VOCAB_SIZE)
    monkeypatch.setattr(corpus, "PIECE", 100)
    other = make(text, "sentencepiece", VOCAB_SIZE, workers=2, cache_dir=tmp_path / "other")
    assert one.name == other.name
    assert content(one) == content(other)


@pytest.mark.parametrize(("size", "advice"), [(100, "at least 28."), (2000, "at most 28.")])
def test_a_vocabulary_that_does_not_fit_is_refused(size, advice, text, make, tmp_path):
    with pytest.raises(ValueError, match=f"^--sentencepiece-vocab-size {size} does not fit this text: give {advice}$"):
        make(text, "sentencepiece", size)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_text_that_is_not_utf8_is_refused(text, make):
    (text / "wiki.test.tokens").write_bytes(b"the cat\nna\xefve\n")
    with pytest.raises(ValueError, match=r"wiki\.test\.tokens is not UTF-8: byte 10 is no part of a character"):
        make(text)


def test_the_cache_follows_the_text(text, make, corpus, monkeypatch):
    first = make(text)
    modified = first.stat().st_mtime_ns
    assert make(text) == first
    assert first.stat().st_mtime_ns == modified
    assert make(text, "char") != first
    write(text, test=TEST.replace("dog", "cat"))
    second = make(text)
    assert second != first
    write(text)
    monkeypatch.setattr(corpus, "_make", None)
    assert make(text) == first


def test_the_progress_is_told_whoever_makes_it(text, make, corpus, monkeypatch, caplog):
    """fairseq lets only the first of many processes log more than warnings."""
    assert logging.getLogger().getEffectiveLevel() == logging.WARNING
    monkeypatch.setattr(corpus, "PIECE", len(TRAIN.encode()) // 3)
    monkeypatch.setattr(corpus, "REPORT_EVERY", 0)
    make(text)
    for doing in ("counting", "binarising"):
        assert f"{doing} wiki.train.tokens: 33 %" in caplog.text
        assert f"{doing} wiki.train.tokens: 67 %" in caplog.text


def test_a_cache_that_cannot_be_written_is_refused(text, make, tmp_path):
    (tmp_path / "occupied").touch()
    with pytest.raises(ValueError, match=r"^the cache .*/occupied cannot be written \(.*\): .* --cache-dir$"):
        make(text, cache_dir=tmp_path / "occupied")


def test_another_machine_may_be_faster(text, make, corpus, monkeypatch):
    write_dictionary = corpus._write_dictionary

    def slowly(building, *args):
        write_dictionary(building, *args)
        finished = building.with_name(building.name.split("@")[0])
        finished.mkdir()
        (finished / "theirs").touch()

    monkeypatch.setattr(corpus, "_write_dictionary", slowly)
    assert list(content(make(text))) == ["theirs"]
    assert len(list((make(text)).parent.iterdir())) == 2


fork = multiprocessing.get_context("fork")


def test_of_processes_that_start_at_once_one_binarises(text, make, corpus, monkeypatch, tmp_path):
    made, original = tmp_path / "made", corpus._make

    def noted(*args):
        with open(made, "a") as file:
            file.write("made\n")
        time.sleep(0.2)
        original(*args)

    monkeypatch.setattr(corpus, "_make", noted)
    processes = [fork.Process(target=make, args=(text,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert made.read_text() == "made\n"
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()) == ["lock", "word"]


def slow_task(signs):
    (signs / str(os.getpid())).touch()
    time.sleep(60)


def test_a_killed_process_leaves_neither_lock_nor_rest_nor_workers(text, make, corpus, monkeypatch, tmp_path):
    """The pipe ends when the last process that holds it has ended."""
    signs, cache = tmp_path / "signs", tmp_path / "cache"
    signs.mkdir()
    reading, writing = os.pipe()
    monkeypatch.setattr(corpus, "_write_split", lambda *_: list(corpus._each(slow_task, [signs] * 2, 2, "")))
    killed = fork.Process(target=make, args=(text,))
    killed.start()
    os.close(writing)
    while len(list(signs.iterdir())) < 2 and killed.is_alive():
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert list(cache.glob(f"word-*@{socket.gethostname()}@*"))
    elsewhere = cache / "word-0123@another-machine@4567"
    elsewhere.mkdir()
    monkeypatch.undo()
    finished = make(text)
    assert sorted(cache.iterdir()) == sorted([cache / "lock", elsewhere, finished])
    assert select.select([reading], [], [], 20)[0]
    assert os.read(reading, 1) == b""
    os.close(reading)


@pytest.fixture
def configure(plugin, text):
    """``configure(*options, command="training")``: fairseq's configuration for the text, 8 tokens a sample."""

    def parse(*more, command="training", data=text, task="wikitext_language_modeling"):
        line = [data, "--user-dir", plugin, "--task", task, "--tokens-per-sample", 8, "--cpu", "--num-workers", 0]
        if command == "training":
            line += ["--arch", "transformer_lm", *SMALL, "--optimizer", "adam", "--lr", 1e-3, "--max-tokens", 80]
        parser = getattr(options, f"get_{command}_parser")()
        return convert_namespace_to_omegaconf(
            options.parse_args_and_arch(parser, [str(word) for word in (*line, *more)])
        )

    return parse


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--preprocess-workers", 0), "--preprocess-workers must be at least 1, not 0"),
        (("--sentencepiece-vocab-size", 9), "--sentencepiece-vocab-size goes with --level sentencepiece, not .* word"),
        (("--level", "sentencepiece"), "pip install sentencepiece"),
    ],
)
def test_wrong_options_are_refused(more, sentence, configure, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=sentence):
        tasks.setup_task(configure(*more).task)


def test_without_a_directory_it_is_refused(configure):
    cfg = configure()
    cfg.task.data = None
    with pytest.raises(ValueError, match="needs the directory of the text"):
        tasks.setup_task(cfg.task)


def test_a_split_that_is_not_there_is_refused(configure, text):
    (text / "wiki.test.tokens").unlink()
    task = tasks.setup_task(configure().task)
    with pytest.raises(ValueError, match=r"text holds no text for the split test: it has train, valid$"):
        task.load_dataset("test")


def test_the_cache_is_beside_the_text_unless_told_otherwise(configure, text, tmp_path):
    cfg = configure()
    tasks.setup_task(cfg.task)
    assert cfg.task.data == str(text)
    assert {path.name.split("-")[0] for path in (text / ".coldstart").iterdir()} == {"lock", "word"}
    tasks.setup_task(configure("--level", "char", "--cache-dir", tmp_path / "there").task)
    assert {path.name.split("-")[0] for path in (text / ".coldstart").iterdir()} == {"lock", "word"}
    assert {path.name.split("-")[0] for path in (tmp_path / "there").iterdir()} == {"lock", "char"}


@pytest.fixture
def trainer(configure):
    """``trainer(*options)``: a trainer of a model whose parameters are all 0: every type is equally likely."""

    def build(*more, data=None):
        cfg = configure(*more) if data is None else configure(*more, data=data)
        cfg.criterion.sentence_avg = cfg.optimization.sentence_avg
        metrics.reset()
        task = tasks.setup_task(cfg.task)
        model = task.build_model(cfg.model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        made = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
        made.get_train_iterator(epoch=1)
        return made

    return build


def validate(trainer, split):
    """What fairseq-train logs of a split."""
    trainer.task.load_dataset(split)
    batches = trainer.get_valid_iterator(split).next_epoch_itr(shuffle=False, set_dataset_epoch=False)
    with metrics.aggregate(new_root=True) as aggregated:
        for sample in batches:
            trainer.valid_step(sample)
    return aggregated.get_smoothed_values()


def train(trainer):
    """What fairseq-train logs of the first update."""
    with metrics.aggregate(new_root=True) as aggregated:
        trainer.train_step([next(trainer.get_train_iterator(epoch=1).next_epoch_itr())])
    return aggregated.get_smoothed_values()


LEVELS = [("--level", "word"), ("--level", "char"), SENTENCEPIECE]
CRITERIA = [
    (),
    ("--sentence-avg",),
    ("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.5),
]


@pytest.mark.parametrize("criterion", CRITERIA, ids=["cross_entropy", "sentence_avg", "label_smoothed"])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level[1])
def test_a_uniform_model_has_the_perplexity_of_its_choices(level, criterion, trainer):
    """V types are equally likely at each of T tokens: V^(T / words), by words."""
    uniform = trainer(*level, *criterion)
    bits = math.log2(len(uniform.task.dictionary))
    logged = {"valid": validate(uniform, "valid"), "test": validate(uniform, "test"), "train": train(uniform)}
    hand = {"valid": VALID_COUNTS["words"], "test": TEST_COUNTS["words"], "train": 12 * (0 + 4 + 0 + 10 + 4 + 5)}
    for split, values in logged.items():
        tokens = uniform.task.counts[split].tokens
        assert values["ppl"] == pytest.approx(2**bits, rel=1e-4)
        assert values["word_ppl"] == pytest.approx(2 ** (bits * tokens / hand[split]), rel=1e-4)
        assert values.get("bpc") == (pytest.approx(bits, abs=1e-3) if "char" in level else None)


def test_the_symbol_at_the_start_of_samples_counts_with_the_words(trainer):
    """--add-bos-token has the model predict it too: 16 tokens in samples of 8 are 18 then."""
    uniform = trainer("--add-bos-token")
    bits = math.log2(len(uniform.task.dictionary))
    assert VALID_COUNTS["words"] == 12
    assert validate(uniform, "valid")["word_ppl"] == pytest.approx(2 ** (bits * 14 / 12), rel=1e-4)


@pytest.fixture
def evaluate(configure, caplog):
    """``evaluate(trainer, *options)``: the log of fairseq-eval-lm."""
    from fairseq_cli import eval_lm

    def run(trainer, path, *more, **kwargs):
        trainer.consolidate_optimizer()
        trainer.save_checkpoint(str(path), {})
        return run_on(path, *more, **kwargs)

    def run_on(path, *more, **kwargs):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            eval_lm.main(configure("--path", path, *more, command="eval_lm", **kwargs))
        return caplog.text

    run.on = run_on
    return run


@pytest.mark.parametrize(
    "samples",
    [
        (),
        ("--context-window", 3),
        ("--sample-break-mode", "complete", "--model-overrides", "{'max_target_positions': 99}"),
        ("--sample-break-mode", "eos", "--model-overrides", "{'max_target_positions': 99}"),
    ],
    ids=lambda samples: " ".join(map(str, samples[:2])),
)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level[1])
def test_eval_lm_reports_what_papers_report(level, samples, trainer, evaluate, tmp_path):
    uniform = trainer(*level, "--max-target-positions", 99)
    log = evaluate(uniform, tmp_path / "uniform.pt", *level, *samples, "--gen-subset", "valid")
    tokens, bits = uniform.task.counts["valid"].tokens, math.log2(len(uniform.task.dictionary))
    found = re.search(
        rf"valid: word perplexity (.*?)(?:, (.*) bits per character)? \(12 words and {tokens} tokens,", log
    )
    assert float(found[1]) == pytest.approx(2 ** (bits * tokens / VALID_COUNTS["words"]), rel=1e-4)
    assert found[2] == (f"{bits:.4f}" if "char" in level else None)
    assert "not comparable" not in log


def test_each_report_is_of_its_own_evaluation(trainer, evaluate, tmp_path):
    uniform = trainer()
    for split, words in (("valid", 12), ("test", 11), ("valid", 12)):
        log = evaluate(uniform, tmp_path / "uniform.pt", "--gen-subset", split)
        assert log.count("word perplexity") == 1
        assert f"{split}: word perplexity {len(uniform.task.dictionary):.2f} ({words} words and {words} tokens" in log


def test_eval_lm_leaves_the_added_symbol_out(trainer, evaluate, tmp_path):
    more = ("--add-bos-token", "--gen-subset", "valid")
    log = evaluate(trainer("--add-bos-token", "--max-target-positions", 9), tmp_path / "uniform.pt", *more)
    assert "(12 words and 12 tokens" in log
    assert "not comparable" not in log


def test_contexts_come_from_one_process(trainer, evaluate, tmp_path):
    """Two processes would each take every second batch for the context of the next."""
    torch.manual_seed(1)
    other = trainer()
    for parameter in other.get_model().parameters():
        torch.nn.init.normal_(parameter)
    more = ("--gen-subset", "valid", "--context-window", 4, "--batch-size", 1)
    logs = [evaluate(other, tmp_path / "other.pt", *more, "--num-workers", workers) for workers in (0, 2)]
    one, two = (re.search(r"word perplexity (\S+)", log)[1] for log in logs)
    assert one == two


def test_a_part_of_the_split_is_not_passed_off_as_the_whole(trainer, evaluate, tmp_path):
    log = evaluate(trainer(), tmp_path / "uniform.pt", "--gen-subset", "valid", "--num-shards", 2, "--batch-size", 1)
    assert re.search("(4|8) of the 12 tokens of valid were evaluated: the following is not comparable", log)


def test_of_no_token_there_is_no_perplexity(trainer, evaluate, tmp_path):
    more = ("--gen-subset", "valid", "--tokens-per-sample", 12)
    with pytest.raises(ValueError, match=r"no token of valid was evaluated, .*: give the --tokens-per-sample of its"):
        evaluate(trainer(), tmp_path / "uniform.pt", *more)


def test_another_dictionary_of_the_same_size_is_refused(trainer, evaluate, text, tmp_path):
    log = evaluate(trainer(), tmp_path / "uniform.pt", "--gen-subset", "valid")
    assert "word perplexity" in log
    write(text, TRAIN.replace("dog", "fox"), TEST, VALID)
    with pytest.raises(ValueError, match=r"another dictionary than that of .*text at --level word: give the text"):
        evaluate.on(tmp_path / "uniform.pt", "--gen-subset", "valid")
    other = write(tmp_path / "elsewhere", test=None)
    assert "word perplexity" in evaluate.on(tmp_path / "uniform.pt", "--gen-subset", "valid", data=other)


def test_a_training_is_not_resumed_with_another_dictionary(trainer, evaluate, text, tmp_path):
    path = tmp_path / "uniform.pt"
    evaluate(trainer(), path, "--gen-subset", "valid")
    trainer().load_checkpoint(str(path))
    write(text, TRAIN.replace("dog", "fox"))
    with pytest.raises(ValueError, match="was trained with another dictionary"):
        trainer().load_checkpoint(str(path))
