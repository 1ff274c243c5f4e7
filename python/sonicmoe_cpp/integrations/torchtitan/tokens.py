"""Tokenised text for torchtitan 0.3: a file of tokens, its data loader, and the command that writes
the file. A run that is resumed with another number of ranks continues with the same samples.

    python -m sonicmoe_cpp.integrations.torchtitan.tokens TEXT_FOLDER --assets ASSETS \\
        --out tokens.npy [--glob '*.txt'] [--train-vocab 50304]

ASSETS is the folder for torchtitan's --hf-assets-path. It has a tokenizer.json, unless
--train-vocab trains one on the text and writes it there. Every file becomes one document, which
ends with the end-of-text token.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from .._release import needs

with needs("torchtitan.tokens", "torchtitan", "0.3"):
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX

END_OF_TEXT = "<|endoftext|>"


class Samples:
    """The samples of a file of tokens. Sample i is in epoch i // count; each epoch has its own
    order."""

    def __init__(self, path: str, seq_len: int):
        self.tokens = numpy.load(path, mmap_mode="r")
        self.seq_len = seq_len
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{path} has shape {self.tokens.shape} and dtype {self.tokens.dtype}, must be one "
                "row of integers"
            )
        self.count = (len(self.tokens) - 1) // seq_len
        if self.count < 1:
            raise ValueError(
                f"{path} has {len(self.tokens)} tokens, a sequence needs {seq_len + 1}"
            )
        # Consecutive samples are about 0.618 of the file apart. The step is coprime to the number
        # of samples, so an epoch visits each sample once.
        self.step = max(1, round(self.count * (math.sqrt(5) - 1) / 2))
        while math.gcd(self.step, self.count) != 1:
            self.step += 1

    def __getitem__(self, number: int) -> Tensor:
        """seq_len + 1 tokens, int64."""
        epoch, place = divmod(number, self.count)
        begin = (place * self.step + epoch) % self.count * self.seq_len
        part = self.tokens[begin : begin + self.seq_len + 1]
        return torch.from_numpy(part.astype(numpy.int64))


def _example(tokens: Tensor, end_of_text: int) -> tuple[Tensor, Tensor, Tensor]:
    """(input, positions, labels). After an end-of-text token positions begin at 0 again. The
    end-of-text token has no label, because the next document does not follow from this document."""
    inputs, labels = tokens[:-1], tokens[1:]
    places = torch.arange(len(inputs), device=inputs.device)
    ends = inputs == end_of_text
    starts = torch.where(ends, places + 1, 0)
    starts = torch.cat([starts.new_zeros(1), starts[:-1]]).cummax(0).values
    return inputs, places - starts, labels.masked_fill(ends, IGNORE_INDEX)


class TokenFileLoader(BaseDataLoader):
    """Step s of a run reads samples s*G to (s+1)*G - 1 of the file, where G is the global batch
    size. The number of ranks determines which rank reads which sample. The state is the number of
    samples that all ranks together have read, so any number of ranks can resume from it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        end_of_text: int = 0
        """Token that ends a document; -1 for none."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **others,
    ):
        if not config.dataset_path:
            raise ValueError(
                "dataloader.dataset_path is not given: the file of tokens that python -m "
                "sonicmoe_cpp.integrations.torchtitan.tokens writes"
            )
        self.samples = Samples(config.dataset_path, seq_len)
        self.end_of_text = config.end_of_text
        self.ranks, self.rank, self.batch = dp_world_size, dp_rank, local_batch_size
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.taken + self.rank * self.batch
            rows = [_example(self.samples[first + i], self.end_of_text) for i in range(self.batch)]
            self.taken += self.ranks * self.batch
            inputs, positions, labels = (torch.stack(part) for part in zip(*rows, strict=True))
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict:
        return {"samples_taken": self.taken}

    def load_state_dict(self, state_dict: dict) -> None:
        if state_dict:
            self.taken = state_dict["samples_taken"]


def _texts(folder: str, glob: str) -> list[Path]:
    found = sorted(path for path in Path(folder).rglob(glob) if path.is_file())
    if not found:
        raise SystemExit(f"{folder} has no file {glob}")
    return found


def _train(files: list[Path], vocab: int, path: Path):
    """A byte-level BPE tokenizer whose token 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f.read_text(errors="replace") for f in files), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def write(folder: str, glob: str, assets: str, out: str, train_vocab: int = 0) -> int:
    """Writes the tokens of the folder's files to `out`; returns their number."""
    from tokenizers import Tokenizer

    files, path = _texts(folder, glob), Path(assets) / "tokenizer.json"
    if train_vocab:
        tokenizer = _train(files, train_vocab, path)
    elif path.is_file():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        raise SystemExit(f"{path} does not exist; --train-vocab N trains it on the text")
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise SystemExit(f"{path} has no token {END_OF_TEXT}")
    dtype = numpy.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else numpy.uint32
    parts = []
    for file in files:
        ids = tokenizer.encode(file.read_text(errors="replace"), add_special_tokens=False).ids
        parts.append(numpy.array([*ids, end], dtype=dtype))
    tokens = numpy.concatenate(parts)
    numpy.save(out, tokens)
    return len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a file of tokens for TokenFileLoader.")
    parser.add_argument("folder")
    parser.add_argument("--glob", default="*")
    parser.add_argument("--assets", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--train-vocab", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given = (options.folder, options.glob, options.assets, options.out, options.train_vocab)
    print(f"{write(*given):,} tokens in {options.out}")


if __name__ == "__main__":
    main()
