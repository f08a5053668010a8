"""The files are checked before they are used, and what is wrong with them is said in a sentence."""

import gzip
import hashlib
import urllib.error

import prepare_multi30k
import pytest
from console import UserError

SENTENCES = {"de": "ein Hund läuft über die Wiese .", "en": "a dog runs across the meadow ."}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small folder of data with the published names, and its checksums in place of the published ones."""
    folder = tmp_path / "source"
    folder.mkdir()
    sums = {}
    for name in prepare_multi30k.SHA256:
        split, language, _ = name.split(".")
        count = 40 if split == "train" else 5
        words = SENTENCES[language].split()
        text = "".join(" ".join(words[i % 3 :] + words[: i % 3]) + f" {chr(97 + i % 20)}\n" for i in range(count))
        (folder / name).write_bytes(gzip.compress(text.encode()))
        sums[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(prepare_multi30k, "SHA256", sums)
    return folder


def test_a_data_set_is_made_from_a_folder(source, tmp_path):
    out = tmp_path / "out"
    prepare_multi30k.prepare(out, source, vocabulary_size=70)
    assert (out / "test.de-en.en.bin").exists()
    assert (out / "raw/test.en").read_text().count("\n") == 5
    assert (out / "dict.de.txt").read_text() == (out / "dict.en.txt").read_text()
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "spm.model"))
    pieces = (out / "pieces/test.de").read_text().splitlines()
    assert [model.decode(line.split()) for line in pieces] == (out / "raw/test.de").read_text().splitlines()


def test_a_missing_file_is_named(source, tmp_path):
    (source / "val.de.gz").unlink()
    with pytest.raises(UserError, match=r"val\.de\.gz is missing; --source must be a folder with .*train\.de\.gz"):
        prepare_multi30k.prepare(tmp_path / "out", source)


def test_a_damaged_file_is_named_with_both_checksums_and_the_remedy(source, tmp_path):
    damaged = source / "train.en.gz"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = hashlib.sha256(damaged.read_bytes()).hexdigest()
    expected = prepare_multi30k.SHA256["train.en.gz"]
    with pytest.raises(UserError, match=rf"train\.en\.gz .*{found}, not {expected}.*fetch it again"):
        prepare_multi30k.prepare(tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


class Network:
    """A stand-in for urlopen: answers from a folder, after `failures` refusals."""

    def __init__(self, folder, failures=0):
        self.folder, self.failures, self.asked = folder, failures, []

    def __call__(self, url, timeout):
        self.asked.append(url.rsplit("/", 1)[1])
        if self.failures:
            self.failures -= 1
            raise urllib.error.URLError("no route to host")
        return (self.folder / self.asked[-1]).open("rb")


def test_a_download_is_tried_again_and_goes_on_with_what_is_missing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_multi30k.time, "sleep", lambda seconds: None)
    network = Network(source, failures=2)
    monkeypatch.setattr(prepare_multi30k.urllib.request, "urlopen", network)
    cache = tmp_path / "cache"
    content = prepare_multi30k.download("val.en.gz", cache)
    assert content == (source / "val.en.gz").read_bytes()
    assert network.asked == ["val.en.gz"] * 3
    assert prepare_multi30k.download("val.en.gz", cache) == content
    assert len(network.asked) == 3


def test_no_network_is_one_sentence_that_mentions_source(source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_multi30k.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(prepare_multi30k.urllib.request, "urlopen", Network(source, failures=99))
    with pytest.raises(UserError, match=r"cannot download .*no route to host.*--source DIR.*SOURCE=DIR"):
        prepare_multi30k.prepare(tmp_path / "out")


def test_the_published_checksums_are_complete():
    assert len(prepare_multi30k.SHA256) == 6
    assert all(len(checksum) == 64 for checksum in prepare_multi30k.SHA256.values())
