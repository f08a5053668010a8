"""What the scripts that prepare text for language models share: files fetched and checked, counts, the command line."""

import argparse
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from console import UserError, one_sentence_errors
from tqdm import tqdm

ATTEMPTS = 4
TIMEOUT = 30
BLOCK = 1 << 20
# Some servers refuse the name that urllib goes by.
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; coldstart)"}


@dataclass(frozen=True)
class Published:
    """A file as it was published: its name, the hash (in hexadecimal) that it must have, and where it is."""

    name: str
    algorithm: str
    digest: str
    url: str

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one."""
        return path.is_file() and digest_of(path, self.algorithm) == self.digest

    def check(self, path: Path, origin: object) -> Path:
        """Return `path`, or raise `UserError` where the file there is not this one."""
        found = digest_of(path, self.algorithm)
        if found != self.digest:
            raise UserError(
                f"{self.name} from {origin} has the {self.algorithm} {found}, not {self.digest}: it is damaged or "
                f"another version; fetch it again from {self.url} and give its folder as --source"
            )
        return path


def digest_of(path: Path, algorithm: str) -> str:
    """The hash of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def obtain(published: Published, source: Path | None, cache: Path) -> Path:
    """The file, checked: from the folder `source` where it is given, else downloaded into the folder `cache`."""
    return from_source(published, source) if source else download(published, cache)


def from_source(published: Published, source: Path) -> Path:
    """The file in the folder `source`, checked."""
    path = source / published.name
    if not path.is_file():
        raise UserError(f"{path} is missing; fetch it from {published.url}, or leave --source out")
    return published.check(path, source)


def download(published: Published, cache: Path) -> Path:
    """The file in the folder `cache`, checked; fetched where it is not there, or the rest of it after an interruption.

    Raises `UserError` when the network does not answer, and for a wrong file, which is not kept.
    """
    path = cache / published.name
    if published.is_at(path):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    fetch(published.url, partial)
    try:
        published.check(partial, published.url)
    except UserError:
        partial.unlink()
        raise
    return partial.replace(path)


def fetch(url: str, partial: Path) -> None:
    """Fetch what `partial` lacks, in several attempts; raise `UserError` where none comes through."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return fetch_rest(url, partial)
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or attempt == ATTEMPTS:
                raise UserError(
                    f"cannot download {url} ({error}); try again later, or fetch {url.rsplit('/', 1)[1]} in some "
                    "other way and give its folder as --source DIR"
                ) from None
            time.sleep(2**attempt)


def fetch_rest(url: str, partial: Path) -> None:
    """Append to `partial` what it lacks; begin anew where the server does not give a part of a file."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = HEADERS | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing comes after these bytes; whether they are right is checked later
            return
        raise
    with response:
        have = have if response.status == 206 else 0
        total = have + int(response.headers.get("Content-Length", 0))
        with partial.open("ab" if have else "wb") as file:
            copy(response, file, partial.stem, total, have)
            if file.tell() < total:
                raise ConnectionError(f"the connection ended after {file.tell():,} of {total:,} bytes")


def copy(source: BinaryIO, target: BinaryIO, name: str, total: int, have: int = 0) -> None:
    """Copy the rest of `source`, with a progress bar: `have` of `total` bytes are there."""
    with tqdm(desc=name, total=total or None, initial=have, unit="B", unit_scale=True) as progress:
        while block := source.read(BLOCK):
            target.write(block)
            progress.update(len(block))


def tokens_of(path: Path) -> int:
    """The words of a text file and one end of line for each line, which is how papers count them."""
    size = path.stat().st_size
    with path.open("rb") as file, tqdm(desc=path.name, total=size, unit="B", unit_scale=True) as progress:
        return sum(len(line.split()) + 1 for line in followed(file, progress))


def followed(lines: Iterable[bytes], progress: tqdm) -> Iterable[bytes]:
    """The lines, with the bar moved in steps that cost no time."""
    passed = 0
    for line in lines:
        passed += len(line)
        if passed > BLOCK:
            progress.update(passed)
            passed = 0
        yield line
    progress.update(passed)


def say_counts(folder: Path, published: dict[str, int]) -> None:
    """Print the tokens of each file of `folder`, and one sentence where they are not the published ones."""
    found = {name: tokens_of(folder / name) for name in published}
    listed = ", ".join(f"{name} {count:,}" for name, count in found.items())
    if found == published:
        print(f"tokens, ends of line included: {listed}, as published")
    else:
        expected = ", ".join(f"{name} {count:,}" for name, count in published.items())
        print(
            f"warning: tokens, ends of line included, are {listed}, and those published are {expected}, "
            "so perplexities on this text do not compare with published ones"
        )


def is_ready(out: Path, names: Iterable[str]) -> bool:
    """Whether the data are in `out`, which is then said; raise `UserError` for a folder with other things in it."""
    if not out.exists():
        return False
    missing = [name for name in names if not (out / name).is_file()]
    if missing:
        raise UserError(f"{out} is there, but without {', '.join(missing)}; move it away or give another --out")
    print(f"{out} is ready; nothing to do")
    return True


def main(prepare: Callable[[Path, Path | None], None], description: str, out: str, source: str) -> None:
    """The command line of a script: `prepare` is given --out, whose default is `out`, and --source."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder to make (default: %(default)s)")
    parser.add_argument("--source", type=Path, metavar="DIR", help=f"folder with {source}, for no download")
    args = parser.parse_args()
    with one_sentence_errors():
        try:
            prepare(args.out, args.source)
        except OSError as error:
            raise UserError(f"cannot make {args.out}: {error}") from None
