"""Make a folder with WikiText-103 (Merity et al., 2016; CC BY-SA), the word-level version, for language models.

    python scripts/prepare_wikitext103.py [--out data/wikitext-103] [--source DIR]

Downloads the archive of 190 MB from its author's mirror, or reads it, or the three files of text, from `--source`, and
checks it against its known checksum. An interrupted download goes on where it stopped. The text is 0.55 GB; its tokens
are counted and compared with the published number. The archive stays in `data/wikitext-103.raw`, which can be deleted.
"""

import zipfile
from pathlib import Path

import corpora
from console import UserError, whole_directory
from corpora import Published

ARCHIVE = Published(
    "wikitext-103-v1.zip",
    "sha256",
    "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    "https://wikitext.smerity.com/wikitext-103-v1.zip",
)
SHA1 = {
    "wiki.train.tokens": "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
    "wiki.valid.tokens": "c326ac59dc587676d58c422eb8a03e119582f92b",
    "wiki.test.tokens": "8a5befc548865cec54ed4273cf87dbbad60d1e47",
}
TOKENS = {"wiki.train.tokens": 103_227_021, "wiki.valid.tokens": 217_646, "wiki.test.tokens": 245_569}


def extracted(source: Path) -> list[Path]:
    """The files of text in the folder `source`, checked; none where the archive is there, or none of them is."""
    if (source / ARCHIVE.name).exists():
        return []
    if not any((source / name).exists() for name in SHA1):
        raise UserError(
            f"{source} has neither {ARCHIVE.name} nor {', '.join(SHA1)}; "
            f"fetch the archive from {ARCHIVE.url}, or leave --source out"
        )
    return [corpora.from_source(Published(name, "sha1", sha1, ARCHIVE.url), source) for name, sha1 in SHA1.items()]


def copy_files(files: list[Path], folder: Path) -> None:
    """Copy the files into the folder."""
    for path in files:
        with path.open("rb") as source, (folder / path.name).open("wb") as target:
            corpora.copy(source, target, path.name, path.stat().st_size)


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of the archive into the folder, without the folder that they are in there."""
    with zipfile.ZipFile(archive) as packed:
        for name in SHA1:
            member = packed.getinfo(f"wikitext-103/{name}")
            with packed.open(member) as source, (folder / name).open("wb") as target:
                corpora.copy(source, target, name, member.file_size)


def prepare(out: Path, source: Path | None = None) -> None:
    """Make the files in `out`, or do nothing where they are there.

    Raises `UserError` for a missing or damaged file, and where the network does not answer.
    """
    if corpora.is_ready(out, SHA1):
        return
    files = extracted(source) if source else []
    archive = None if files else corpora.obtain(ARCHIVE, source, out.parent / f"{out.name}.raw")
    with whole_directory(out) as partial:
        if archive:
            unpack(archive, partial)
        else:
            copy_files(files, partial)
        corpora.say_counts(partial, TOKENS)
    print(f"{out} is ready")


if __name__ == "__main__":
    corpora.main(
        prepare,
        "WikiText-103, the word-level version, for language models.",
        "data/wikitext-103",
        f"{ARCHIVE.name} or its three files wiki.*.tokens",
    )
