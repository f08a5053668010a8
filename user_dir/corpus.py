"""Text as data sets bring it, binarised once: fairseq's dictionary and binary files, and the counts papers divide by.

The files are those of ``fairseq-preprocess --only-source``, byte for byte, made a few megabytes of text at a time.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset, best_fitting_int_dtype

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
REQUIRED = ("train", "valid")
SCHEMES = ("wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.txt")
LEVELS = ("word", "char", "sentencepiece")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as sentencepiece writes it; a dictionary file cannot hold a space
SENTENCEPIECE_VOCAB_SIZE = 8000
SENTENCEPIECE_MODEL = "sentencepiece.model"

FORMAT = 1  # of what a cache holds; another number makes new caches
PIECE = 4 << 20  # bytes of text that are worked on, and reported, at once
REPORT_EVERY = 10.0  # seconds

Tokenise = Callable[[str], list[str]]


@dataclass
class Counts:
    """What a split holds. An end of line counts as a word, as a character and as a token, as WikiText and the Penn
    Treebank have it."""

    lines: int = 0
    words: int = 0
    characters: int = 0
    tokens: int = 0
    unknown: int = 0  # tokens that the dictionary lacks

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Settings:
    """What a cache depends on beside the text."""

    level: str = "word"
    vocab_size: int | None = None  # of sentencepiece


def find_text(directory: Path) -> dict[str, Path]:
    """The text file of each split that there is.

    Raises:
        ValueError: one sentence; ``directory`` does not hold one data set with text to train on and to validate on.
    """
    expected = ", ".join(scheme.format("{train,valid,test}") for scheme in SCHEMES)
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory: name the one that holds {expected}")
    found = {
        scheme: {split: path for split in SPLITS if (path := directory / scheme.format(split)).is_file()}
        for scheme in SCHEMES
    }
    found = {scheme: files for scheme, files in found.items() if files}
    if not found and (directory / "dict.txt").is_file():
        raise ValueError(f"{directory} holds binarised text (dict.txt), not text: use --task language_modeling for it")
    if not found:
        raise ValueError(f"{directory} holds no text of a known name: expected {expected}")
    if len(found) > 1:
        names = " and ".join(next(iter(files.values())).name for files in found.values())
        raise ValueError(f"{directory} holds more than one data set ({names}): give each a directory of its own")
    [(scheme, files)] = found.items()
    for split in REQUIRED:
        if split not in files:
            beside = ", ".join(path.name for path in files.values())
            raise ValueError(f"{directory} lacks {scheme.format(split)}, but holds {beside}")
    for path in files.values():
        with open(path, "rb") as text:
            if all(line.isspace() for line in text):
                raise ValueError(f"{path} is empty: put its text back, or download it again")
    return files


def binarised(files: dict[str, Path], settings: Settings, cache_dir: Path, workers: int) -> Path:
    """The directory that holds ``files`` binarised, and ``counts.json``; made unless it is there.

    Of the processes of one machine that come here at once, one makes it while the others wait. Among machines, the
    first to be ready wins. What a killed process has left is removed by the next one that makes anything.

    Raises:
        ValueError: one sentence; the cache cannot be written, or the text or the settings do not allow it.
    """
    finished = cache_dir / f"{settings.level}-{_fingerprint(files, settings)}"
    if finished.is_dir():
        return finished
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _alone(cache_dir / "lock"):
            if not finished.is_dir():
                _make(finished, files, settings, workers)
    except OSError as error:
        raise ValueError(f"the cache {cache_dir} cannot be written ({error}): name another with --cache-dir") from None
    return finished


def counts_of(directory: Path) -> dict[str, Counts]:
    """The counts of every split of a cache."""
    return {split: Counts(**counts) for split, counts in json.loads((directory / "counts.json").read_text()).items()}


def _fingerprint(files: dict[str, Path], settings: Settings) -> str:
    digest = hashlib.blake2b(json.dumps([FORMAT, asdict(settings), list(files)]).encode(), digest_size=8)
    for path in files.values():
        with open(path, "rb") as text:
            digest.update(hashlib.file_digest(text, "blake2b").digest())
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock ``path``: of one process, which ends with it even where its worker processes live on."""
    with open(path, "w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info(f"waiting for another process, which is binarising in {path.parent}")
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _make(finished: Path, files: dict[str, Path], settings: Settings, workers: int) -> None:
    host = socket.gethostname()
    for abandoned in finished.parent.glob(f"*@{host}@*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    building = finished.with_name(f"{finished.name}@{host}@{secrets.token_hex(4)}")
    building.mkdir()
    started = time.monotonic()
    logger.setLevel(logging.INFO)  # fairseq silences all ranks but the first, and this may be another
    logger.info(f"binarising the text of {files['train'].parent} into {finished} with {workers} workers")
    try:
        _write_dictionary(building, files["train"], settings, workers)
        counts = {split: _write_split(building, split, path, settings, workers) for split, path in files.items()}
        text = json.dumps({split: asdict(found) for split, found in counts.items()}, indent=1)
        (building / "counts.json").write_text(f"{text}\n")
        _rename(building, finished)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info(f"binarised in {time.monotonic() - started:.0f} s")


def _rename(building: Path, finished: Path) -> None:
    try:
        building.rename(finished)
    except OSError:
        if not finished.is_dir():  # another machine was faster
            raise


def _write_dictionary(building: Path, path: Path, settings: Settings, workers: int) -> None:
    """Write dict.txt, and before it the sentencepiece model, from the training text."""
    counter: Counter[str] = Counter()
    tasks = [(settings.level, path, *ends) for ends in _pieces(path)]
    for counted in _each(_count_tokens, tasks, workers, f"counting {path.name}"):
        counter.update(counted)
    if settings.level == "sentencepiece":
        counter = _train_sentencepiece(building, counter, settings.vocab_size)
    dictionary = Dictionary()
    for symbol, count in counter.items():
        dictionary.add_symbol(symbol, count)
    dictionary.finalize()
    dictionary.save(str(building / "dict.txt"))
    logger.info(f"dictionary: {len(dictionary):,} types")


def _train_sentencepiece(building: Path, words: Counter[str], vocab_size: int) -> Counter[str]:
    """Write a sentencepiece model of the training words and return how often each of its pieces occurs in them.

    Pieces do not cross words, so that the counts of the words say all. Nothing is lost: there is no normalisation,
    and a rare character falls into its bytes.
    """
    path = building / SENTENCEPIECE_MODEL
    counted = (f"{word}\t{count}" for word, count in sorted(words.items()))
    logger.info(f"training a sentencepiece model of {vocab_size:,} pieces on {len(words):,} different words")
    try:
        with open(path, "wb") as model:
            import_sentencepiece().SentencePieceTrainer.train(
                sentence_iterator=counted,
                input_format="tsv",
                model_writer=model,
                vocab_size=vocab_size,
                split_by_unicode_script=False,
                normalization_rule_name="identity",
                byte_fallback=True,
                unk_piece="no piece",  # "<unk>" is a word of the text
                bos_id=-1,
                eos_id=-1,
                minloglevel=2,
            )
    except RuntimeError as error:
        bound = re.search(r" vs (?P<least>\d+)|<= (?P<most>\d+)", str(error))
        if not bound:
            raise
        advice = f"at least {bound['least']}" if bound["least"] else f"at most {bound['most']}"
        raise ValueError(f"--sentencepiece-vocab-size {vocab_size} does not fit this text: give {advice}") from None
    pieces = _WordPieces(path)
    processor = pieces.processor
    numbers = (number for number in range(len(processor)) if not processor.is_unknown(number))
    counter = Counter(dict.fromkeys(map(processor.id_to_piece, numbers), 0))
    for word, count in words.items():
        for piece in pieces[word]:
            counter[piece] += count
    return counter


def import_sentencepiece() -> Any:
    """The module; ValueError with the remedy where it is not installed."""
    try:
        import sentencepiece
    except ImportError:
        raise ValueError("--level sentencepiece needs a package that is missing: pip install sentencepiece") from None
    return sentencepiece


class _WordPieces(dict[str, list[str]]):
    """The pieces of each word, kept for the next time."""

    def __init__(self, model: Path) -> None:
        self.processor = import_sentencepiece().SentencePieceProcessor(model_file=str(model))

    def __missing__(self, word: str) -> list[str]:
        pieces = self[word] = self.processor.encode(word, out_type=str)
        return pieces


def _characters(line: str) -> list[str]:
    return list(line.strip().replace(" ", SPACE))


def _tokeniser(level: str, directory: Path) -> Tokenise:
    """What makes tokens of a line, its end left out."""
    if level == "sentencepiece":
        words = _WordPieces(directory / SENTENCEPIECE_MODEL)
        return lambda line: [piece for word in line.split() for piece in words[word]]
    return _characters if level == "char" else str.split


def _count_tokens(task: tuple[str, Path, int, int]) -> Counter[str]:
    """How often each token occurs in a piece of text; each word, where the tokens are to be learned from it."""
    level, *piece = task
    tokenise = _characters if level == "char" else str.split
    counter: Counter[str] = Counter()
    for line in _read_lines(*piece):
        counter.update(tokenise(line))
    return counter


def _write_split(building: Path, split: str, path: Path, settings: Settings, workers: int) -> Counts:
    """Write ``split``.bin and ``split``.idx, the pieces one behind the other."""
    total, sizes = Counts(), []
    pieces = _pieces(path)
    parts = [building / f"{split}.{number}" for number in range(len(pieces))]
    tasks = [(settings.level, building, part, path, *ends) for part, ends in zip(parts, pieces, strict=True)]
    with open(building / f"{split}.bin", "wb") as whole:
        results = _each(_binarise, tasks, workers, f"binarising {path.name}")
        for part, (counts, part_sizes) in zip(parts, results, strict=True):
            with open(part, "rb") as data:
                shutil.copyfileobj(data, whole)
            part.unlink()
            sizes.extend(part_sizes)
            total += counts
    dtype = best_fitting_int_dtype(len(_dictionary(building)))
    with MMapIndexedDataset.Index.writer(building / f"{split}.idx", dtype) as index:
        index.write(sizes)
    unknown = f", {100 * total.unknown / total.tokens:.2g} % of them unknown" if total.unknown else ""
    logger.info(f"{path.name}: {total.lines:,} lines, {total.words:,} words, {total.tokens:,} tokens{unknown}")
    return total


def _binarise(task: tuple[str, Path, Path, Path, int, int]) -> tuple[Counts, list[int]]:
    """Write the token numbers of a piece of text to a file; return the counts, and the tokens of each line."""
    level, directory, part, *piece = task
    dictionary, tokenise = _dictionary(directory), _cached_tokeniser(level, directory)
    number, unknown, end = dictionary.indices.get, dictionary.unk(), dictionary.eos()
    counts, ids, sizes = Counts(), [], []
    for line in _read_lines(*piece):
        tokens = tokenise(line)
        numbers = [number(token, unknown) for token in tokens]
        ids += numbers
        ids.append(end)
        sizes.append(len(tokens) + 1)
        counts.words += len(line.split()) + 1
        counts.characters += len(line.strip()) + 1
        counts.unknown += numbers.count(unknown) - tokens.count(dictionary.unk_word)
    np.array(ids, dtype=best_fitting_int_dtype(len(dictionary))).tofile(part)
    counts.lines, counts.tokens = len(sizes), len(ids)
    return counts, sizes


@functools.lru_cache(maxsize=1)
def _dictionary(directory: Path) -> Dictionary:
    return Dictionary.load(str(directory / "dict.txt"))


_cached_tokeniser = functools.lru_cache(maxsize=1)(_tokeniser)


def _pieces(path: Path) -> list[tuple[int, int]]:
    """The first and last byte of pieces of about PIECE bytes that end where lines end."""
    size = path.stat().st_size
    ends = {0, size}
    with open(path, "rb") as text:
        for near in range(PIECE, size, PIECE):
            text.seek(near)
            text.readline()
            ends.add(text.tell())
    return list(itertools.pairwise(sorted(ends)))


def _read_lines(path: Path, start: int, end: int) -> list[str]:
    """The lines of a piece, their ends left out; ends of any system, as Python's text mode has them."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(end - start)
    try:
        lines = re.split(r"\r\n?|\n", data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {start + error.start} is no part of a character") from None
    return lines if lines[-1] else lines[:-1]


def _each(function: Callable, tasks: list, workers: int, doing: str) -> Iterator[Any]:
    """The results of ``function`` for every task, in order, with a line of progress now and then."""
    workers = min(workers, len(tasks))
    reported = time.monotonic()
    with contextlib.ExitStack() as stack:
        results: Iterable = map(function, tasks)
        if workers > 1:
            pool = stack.enter_context(Pool(workers, _end_with_parent, (os.getpid(),)))
            results = pool.imap(function, tasks)
        for done, result in enumerate(results, start=1):
            yield result
            if time.monotonic() - reported > REPORT_EVERY:
                logger.info(f"{doing}: {100 * done / len(tasks):.0f} %")
                reported = time.monotonic()


def _end_with_parent(parent: int) -> None:
    """A worker process, which waits for work, would wait for ever if its parent were killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
