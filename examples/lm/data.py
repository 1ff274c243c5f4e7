"""Text to tokens: find files, split them, train a byte-level BPE, cut batches."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# The tokeniser's threads save no time here, and it panics if it cannot start them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lm.config import Config
from lm.errors import UserError

END_OF_TEXT = "<|endoftext|>"
# To the BPE, a run of letters, of digits, of other signs or of white space is one word. Training
# takes time quadratic in the length of a word, so longer runs are cut into words of LONGEST_WORD
# characters. The standard library has no run of more than 80 characters.
LONGEST_WORD = 256
_LONG_WORD = "|".join(
    f"{kind}{{{LONGEST_WORD}}}" for kind in (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s")
)
# Folders of the standard library that hold tests, generated tables or installed packages.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
)


@dataclass(frozen=True)
class Split:
    """The texts of both sides of the split; no file is on both."""

    train: list[str]
    validation: list[str]


@dataclass(frozen=True)
class Corpus:
    """The tokens of both sides of the split, and their tokenizer."""

    tokenizer: Tokenizer
    train: np.ndarray  # token ids, files in order, each followed by END_OF_TEXT
    validation: np.ndarray
    train_files: int
    validation_files: int
    validation_bytes: int

    def digest(self) -> str:
        """A hash of these tokens: a resumed run refuses to continue on changed text."""
        return hashlib.sha256(self.train.tobytes() + b"|" + self.validation.tobytes()).hexdigest()


def _find(folder: str, pattern: str) -> list[Path]:
    if not folder:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = root.rglob(pattern or "*.py")
        found = (p for p in found if LEFT_OUT.isdisjoint(p.relative_to(root).parts))
    else:
        root = Path(folder)
        if not root.is_dir():
            raise UserError(f"data folder {folder} does not exist or is not a folder")
        found = root.rglob(pattern or "*")
    return sorted(p for p in found if p.is_file())


def find_files(folder: str, pattern: str) -> list[Path]:
    """The files asked for, in a fixed order."""
    try:
        return _find(folder, pattern)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    except (ValueError, IndexError, NotImplementedError) as error:
        raise UserError(
            f"glob is '{pattern}'; it must be a pattern relative to the data folder: {error}"
        ) from error
    except RecursionError as error:
        raise UserError(f"data folder {folder} has too many levels") from error


def read_texts(paths: list[Path]) -> list[str]:
    """The UTF-8 texts among the files; empty files, binaries and exact copies are left out."""
    texts: dict[bytes, str] = {}
    for path in paths:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if not raw.strip() or b"\0" in raw:
            continue
        try:
            texts.setdefault(hashlib.sha256(raw).digest(), raw.decode("utf-8"))
        except UnicodeDecodeError:
            continue
    return list(texts.values())


def split_by_file(texts: list[str], fraction: float) -> Split:
    """Files in the order of their content's hash fill the validation side up to its share.

    The split depends only on the contents of the files, not on their names or their order.
    """
    if len(texts) < 2:
        raise UserError(
            f"the text is in {len(texts)} usable file(s); the split by file needs at least 2"
        )
    order = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    budget = fraction * sum(len(text) for text in order)
    validation: list[str] = []
    train: list[str] = []
    for text in order:
        if len(text) <= budget:
            validation.append(text)
            budget -= len(text)
        else:
            train.append(text)
    if not validation:  # every file is larger than the share: take the smallest
        smallest = min(train, key=len)
        train.remove(smallest)
        validation.append(smallest)
    return Split(train, validation)


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab` entries, which can encode every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LONG_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab:
        raise UserError(
            f"the text is too little for a vocabulary of {vocab}: it yields "
            f"{tokenizer.get_vocab_size()} entries; give more text or a smaller --vocab"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one int32 array, END_OF_TEXT after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        pieces += encoding.ids
        pieces.append(end)
    return np.array(pieces, dtype=np.int32)


def load_corpus(config: Config) -> Corpus:
    """Reads, splits and tokenises the text of a run."""
    texts = read_texts(find_files(config.data, config.glob))
    where = config.data or "the standard library"
    if not texts:
        raise UserError(f"{where} has no text that matches '{config.glob or '*'}'")
    split = split_by_file(texts, config.val_fraction)
    tokenizer = train_tokenizer(split.train, config.vocab)
    train, validation = encode(tokenizer, split.train), encode(tokenizer, split.validation)
    for name, tokens, least in (
        ("training", train, config.batch * (config.context + 1) + config.context),
        ("validation", validation, config.context + 1),
    ):
        if len(tokens) < least:
            raise UserError(
                f"{where} is too little text: {len(tokens)} {name} tokens, at least {least} are "
                f"needed for context {config.context} and batch {config.batch}"
            )
    return Corpus(
        tokenizer,
        train,
        validation,
        len(split.train),
        len(split.validation),
        sum(len(text.encode()) for text in split.validation),
    )


class Batches:
    """Training batches as a pure function of (seed, step), so a checkpoint stores no state of them.

    Each epoch walks all windows of the text once, in a fresh order and at a fresh offset.
    """

    def __init__(self, tokens: np.ndarray, config: Config):
        self._tokens = tokens
        self._config = config
        # One window fewer than would fit, so that windows moved by an offset below `context` still
        # fit.
        self._windows = (len(tokens) - config.context) // config.context
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def _start(self, sample: int) -> int:
        epoch, place = divmod(sample, self._windows)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._config.seed, epoch])
            offset = rng.integers(self._config.context)
            self._starts = rng.permutation(self._windows) * self._config.context + offset
            self._epoch = epoch
        return int(self._starts[place])

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (batch, context) int64 of a step."""
        batch, context = self._config.batch, self._config.context
        starts = [self._start(step * batch + i) for i in range(batch)]
        rows = np.stack([self._tokens[s : s + context + 1] for s in starts]).astype(np.int64)
        return rows[:, :-1].copy(), rows[:, 1:].copy()


def validation_windows(tokens: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (windows, context) int64 from the beginning of the split. Tokens at the
    end that do not fill a window are dropped.

    Models and baselines are scored on these targets.
    """
    windows = (len(tokens) - 1) // context
    inputs = tokens[: windows * context].reshape(windows, context).astype(np.int64)
    targets = tokens[1 : windows * context + 1].reshape(windows, context).astype(np.int64)
    return inputs, targets
