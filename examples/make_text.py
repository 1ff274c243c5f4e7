#!/usr/bin/env python3
"""Makes the text of quality_study.py: sources and documentation of many packages, downloaded by
pip, each file once, as the tokens of a byte-level BPE.

    python examples/make_text.py --out out/text                   every package of the list
    python examples/make_text.py --out out/text --tokens 90e6     until there are 90 million tokens

--packages names a list like quality/packages.txt. Downloads are kept as text in OUT/packages, so
the same command continues after an interruption. Packages that pip cannot get are named and left
out. OUT/parts receives

    meta.json                vocabulary, tokens of each kind and split, packages and their licences
    tokenizer.json           the BPE, trained on a sample of the text
    KIND-SPLIT-NN.xz         uint16 tokens, little-endian, at most 20 million in a part; KIND is
                             sources or documentation, SPLIT train or validation

A part is smaller than 55 MiB. Parts of KIND-train are read in order: a few of them are a smaller
corpus. Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

import argparse
import gzip
import hashlib
import json
import lzma
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import numpy as np
from lm.data import END_OF_TEXT, train_tokenizer
from lm.errors import UserError, exit_code
from lm.files import make_folder, write_file
from tokenizers import Tokenizer

KINDS = {"sources": (".py",), "documentation": (".rst", ".txt", ".md")}
DOWNLOADS = {"sources": "--only-binary=:all:", "documentation": "--no-binary=:all:"}
SMALLEST, LARGEST = 256, 300_000  # bytes of a file; larger files are mostly tables
MOST_OF_PACKAGE = 20_000_000  # bytes of text of a package, so that none dominates
LONGEST_LINE = 1_000  # characters; files with longer lines are mostly generated
SEPARATOR = "\0"  # between the files of a package; no file has it
PART_TOKENS = 20_000_000
VALIDATION = 64  # one file of so many, by its hash
# LZMA2 for 16-bit values: pb and lp say that units of two bytes are aligned.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 4, "pb": 1, "lp": 1, "lc": 3}]


@dataclass(frozen=True)
class Package:
    kind: str
    name: str

    @property
    def file(self) -> str:
        return f"{self.name}.{self.kind}"


def read_list(path: str) -> list[Package]:
    """The packages of a list: lines "KIND: NAME NAME ...", comments after #."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the list of packages {path}: {error}") from error
    found = []
    for line in lines:
        kind, _, names = line.split("#")[0].partition(":")
        if not kind.strip():
            continue
        if kind.strip() not in KINDS:
            raise UserError(f"a line of {path} begins with '{kind}', must be {' or '.join(KINDS)}")
        found += [Package(kind.strip(), name) for name in names.split()]
    bad = next((p.name for p in found if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", p.name)), None)
    if bad:
        raise UserError(f"'{bad}' in {path} must be the name of a package")
    return list(dict.fromkeys(found))


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the small files of a wheel or source distribution."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as whole:
            for info in whole.infolist():
                if info.file_size <= LARGEST:
                    yield info.filename, whole.read(info)
        return
    with tarfile.open(archive) as whole:
        for info in whole:
            if info.isfile() and info.size <= LARGEST:
                yield info.name, whole.extractfile(info).read()


def usable(name: str, content: bytes, kind: str) -> str | None:
    """The text of a file that belongs into the corpus; None for others."""
    if not name.lower().endswith(KINDS[kind]) or len(content) < SMALLEST:
        return None
    try:
        text = content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if SEPARATOR in text or max(map(len, text.split("\n"))) > LONGEST_LINE:
        return None
    return text


def licence(archive: Path) -> str:
    """What a package's metadata says about its licence."""
    for name, content in members(archive):
        if name.endswith((".dist-info/METADATA", "PKG-INFO")):
            fields = Parser().parsestr(content.decode(errors="replace"), headersonly=True)
            classes = [
                c.split(" :: ")[-1]
                for c in fields.get_all("Classifier", [])
                if c.startswith("License ::")
            ]
            short = (fields.get("License") or "").strip()
            short = short if short and "\n" not in short and len(short) < 80 else ""
            return fields.get("License-Expression") or ", ".join(classes) or short or "unknown"
    return "unknown"


def download(package: Package, folder: Path) -> Path | None:
    """The archive of a package, by pip; None if pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += [DOWNLOADS[package.kind], package.name]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=240)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return next(folder.iterdir(), None)


def collect(package: Package, out: Path) -> None:
    """Downloads a package and keeps its text in out/packages; does nothing if that was done."""
    text_file, facts_file = (out / "packages" / f"{package.file}.{end}" for end in ("gz", "json"))
    if facts_file.exists():
        return
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        archive = download(package, Path(folder))
        if archive is None:
            print(f"{package.kind} {package.name}: pip cannot get it", flush=True)
            return
        try:
            facts = {"name": package.name, "kind": package.kind, "archive": archive.name}
            facts["licence"] = licence(archive)
            size = 0
            for name, content in members(archive):
                text = usable(name, content, package.kind)
                if text is not None and size + len(content) <= MOST_OF_PACKAGE:
                    texts.append(text)
                    size += len(content)
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise UserError(f"{archive.name} cannot be read: {error}") from error
    facts |= {"files": len(texts), "bytes": size}
    write_file(text_file, gzip.compress(SEPARATOR.join(texts).encode(), 1))
    write_file(facts_file, json.dumps(facts).encode())
    print(f"{package.kind} {package.name}: {size / 1e6:.1f} MB", flush=True)


def texts_of(package: Package, out: Path, seen: set[bytes]) -> list[str]:
    """The files of a package whose content no earlier package has."""
    whole = gzip.decompress((out / "packages" / f"{package.file}.gz").read_bytes()).decode()
    fresh = []
    for text in whole.split(SEPARATOR) if whole else []:
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            fresh.append(text)
    return fresh


def split_of(text: str) -> str:
    first = hashlib.sha256(text.encode()).digest()[:4]
    return "validation" if int.from_bytes(first, "big") % VALIDATION == 0 else "train"


class Writer:
    """Writes the tokens of one kind and split as parts."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.tokens, self.parts = 0, []
        self._held: list[np.ndarray] = []
        self._count = 0

    def add(self, tokens: np.ndarray) -> bool:
        """Whether a part was completed and written."""
        self._held.append(tokens)
        self._count += len(tokens)
        if self._count < PART_TOKENS:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        if not self._count:
            return
        file = f"{self.name}-{len(self.parts):02d}.xz"
        raw = np.concatenate(self._held).astype("<u2").tobytes()
        content = lzma.compress(raw, format=lzma.FORMAT_XZ, filters=FILTERS)
        write_file(self.folder / file, content)
        print(f"{file}: {self._count:,} tokens, {len(content) / 2**20:.1f} MiB", flush=True)
        self.parts.append({"file": file, "tokens": self._count, "bytes": len(content)})
        self.tokens += self._count
        self._held, self._count = [], 0


def make_tokenizer(packages: list[Package], out: Path, vocab: int) -> Tokenizer:
    """A BPE trained on every tenth file; kept for the next call."""
    path = out / "parts" / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.get_vocab_size() != vocab:
            raise UserError(f"{path} has another vocabulary than {vocab}; choose another --out")
        return tokenizer
    seen: set[bytes] = set()
    sample = [t for p in packages for t in texts_of(p, out, seen)[::10]]
    random.Random(0).shuffle(sample)
    sizes = np.cumsum([len(text) for text in sample])
    tokenizer = train_tokenizer(sample[: int(np.searchsorted(sizes, 24_000_000)) + 1], vocab)
    write_file(path, tokenizer.to_str().encode())
    return tokenizer


def write_parts(packages: list[Package], out: Path, vocab: int, most: float) -> None:
    tokenizer = make_tokenizer(packages, out, vocab)
    end = tokenizer.token_to_id(END_OF_TEXT)
    writers = {
        f"{kind}-{split}": Writer(out / "parts", f"{kind}-{split}")
        for kind in KINDS
        for split in ("train", "validation")
    }
    seen: set[bytes] = set()
    used: list[dict] = []
    total = dict.fromkeys(KINDS, 0)
    # In a random order, so that a few parts are as varied as all of them.
    for package in random.Random(0).sample(packages, len(packages)):
        if total[package.kind] >= most:
            continue
        texts = texts_of(package, out, seen)
        used.append(json.loads((out / "packages" / f"{package.file}.json").read_text()))
        for text, encoding in zip(
            texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            tokens = np.array([*encoding.ids, end], dtype=np.uint16)
            total[package.kind] += len(tokens)
            if writers[f"{package.kind}-{split_of(text)}"].add(tokens):
                write_meta(out, vocab, writers, used)
    for writer in writers.values():
        writer.flush()
    write_meta(out, vocab, writers, used)
    print({name: writer.tokens for name, writer in writers.items()})


def write_meta(out: Path, vocab: int, writers: dict[str, Writer], used: list[dict]) -> None:
    """Describes the parts that are written."""
    meta = {"vocab": vocab, "parts": {name: w.parts for name, w in writers.items()}}
    meta["tokens"] = {name: w.tokens for name, w in writers.items()}
    meta["packages"] = [facts for facts in used if facts["files"]]
    write_file(out / "parts" / "meta.json", (json.dumps(meta, indent=1) + "\n").encode())


def make(argv: list[str]) -> int:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="out/text")
    parser.add_argument("--packages", default=str(here / "quality/packages.txt"))
    parser.add_argument("--tokens", type=float, default=float("inf"), help="most of each kind")
    parser.add_argument("--vocab", type=int, default=16384, help="entries of the BPE")
    own = parser.parse_args(argv)
    if not 257 <= own.vocab <= 1 << 16:
        raise UserError(f"vocab is {own.vocab}; it must be from 257 to 65536")
    out = Path(own.out)
    for folder in ("packages", "parts"):
        make_folder(out / folder)
    packages = read_list(own.packages)
    for package in packages:
        collect(package, out)
    found = [p for p in packages if (out / "packages" / f"{p.file}.json").exists()]
    if not found:
        raise UserError(f"pip could get none of the packages of {own.packages}")
    write_parts(found, out, own.vocab, own.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: make(sys.argv[1:]), "interrupted; the same command continues"))
