"""The demo's settings, text and baselines (examples/lm)."""

import dataclasses
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from demo_support import EXAMPLES, TINY, write_text
from lm import baselines, config, data, device
from lm.config import SHORT, Config, parse
from lm.errors import UserError


@pytest.fixture
def text(tmp_path):
    """A folder of text."""
    return write_text(tmp_path / "text")


def test_defaults_are_valid_and_a_flag_wins_over_the_file_over_short(tmp_path):
    assert parse(["--device", "cpu"]).config == Config(device="cpu", precision="fp32")
    file = tmp_path / "settings.yaml"
    file.write_text("steps: 70\nlr: 2e-3\nexpert_width: 32\n")
    request = parse(["--short", "--config", str(file), "--expert-width", "48"])
    assert request.short and not request.resume
    assert request.config.steps == 70
    assert request.config.lr == 0.002
    assert request.config.expert_width == 48
    assert request.config.warmup == SHORT["warmup"]
    assert parse(["--resume"]).resume


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("step: 3", "unknown config key 'step'"),
        ("steps: many", "config key 'steps' takes an integer, got 'many'"),
        ("steps: true", "config key 'steps' takes an integer, got True"),
        ("lr: [1]", "config key 'lr' in"),
        ("- steps", "must hold 'key: value' lines"),
        ("a: b: c", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, sentence):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        parse(["--config", str(file)])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--top-k", "65"], "top_k is 65; it must be at most experts = 64"),
        (["--steps", "0"], "steps is 0; it must be from 1 to 10000000"),
        (["--lr", "nan"], "lr is nan; it must be finite and at least 0"),
        (["--val-fraction", "0.7"], "val_fraction is 0.7; it must be from 0 to 0.5"),
        (["--width", "100", "--heads", "8"], "a multiple of 2 * heads = 16"),
        (["--rounding", "sideways"], "rounding is 'sideways'; it must be one of nearest"),
        (["--accumulate", "3"], "accumulate is 3; it must divide batch = 8"),
        (["--device", "abacus"], "device is 'abacus'; it must be cpu or cuda"),
        (["--precision", "int1"], "precision is 'int1'; it must be one of fp32, bf16, fp8"),
        (["--steps", "ten"], "invalid int value: 'ten'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--config", "/no/such/file"], "cannot read config file /no/such/file"),
    ],
)
def test_bad_flags_are_refused(argv, sentence):
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert sentence in str(caught.value)


def test_the_split_depends_on_the_files_alone_and_keeps_them_apart(text):
    texts = data.read_texts(data.find_files(str(text), ""))
    first = data.split_by_file(texts, 0.2)
    again = data.split_by_file(texts[::-1], 0.2)
    assert first == again
    assert sorted(first.train + first.validation) == sorted(texts)
    assert not set(first.train) & set(first.validation)
    share = sum(map(len, first.validation)) / sum(map(len, texts))
    assert 0.1 < share <= 0.2
    # However small its share, validation has a file.
    assert len(data.split_by_file(texts, 1e-9).validation) == 1


def test_copies_binaries_and_empty_files_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("two")
    (tmp_path / "copy.txt").write_text("one")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "zeros.bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert data.read_texts(data.find_files(str(tmp_path), "")) == ["one", "two"]
    assert data.find_files(str(tmp_path), "*.bin") == [tmp_path / "zeros.bin"]


def test_the_standard_library_without_its_tests_and_tables():
    names = [path.as_posix() for path in data.find_files("", "")]
    assert any(name.endswith("/argparse.py") for name in names)
    for left_out in ("/test/", "/tests/", "/encodings/", "/pydoc_data/"):
        assert not any(left_out in name for name in names)


def test_tokens_are_reversible_deterministic_and_separated(text):
    settings = TINY | {"data": str(text)}
    corpus = data.load_corpus(Config(**settings))
    assert corpus.tokenizer.get_vocab_size() == 280
    assert corpus.digest() == data.load_corpus(Config(**settings)).digest()
    end = corpus.tokenizer.token_to_id(data.END_OF_TEXT)
    assert (corpus.train == end).sum() == corpus.train_files
    assert (corpus.validation == end).sum() == corpus.validation_files
    split = data.split_by_file(data.read_texts(data.find_files(str(text), "")), 0.04)
    assert corpus.tokenizer.decode(corpus.validation[:-1].tolist()) == split.validation[0]


def test_long_runs_of_letters_take_no_quadratic_time():
    rng = random.Random(0)
    letters = "".join(rng.choices("abcdefghijklmnop", k=160_000))
    began = time.process_time()
    tokenizer = data.train_tokenizer([letters], 1024)
    for signs in ("a", "7", "-", " ", "\n", "é"):
        data.train_tokenizer([signs * 160_000], 260)
    assert time.process_time() - began < 3  # it took 40 s
    assert tokenizer.decode(tokenizer.encode(letters).ids) == letters


@pytest.mark.parametrize(
    ("files", "words", "settings", "sentence"),
    [
        (0, 0, {}, "has no text"),
        (1, 400, {}, "is in 1 usable file(s); the split by file needs at least 2"),
        (3, 40, {"vocab": 2048}, "too little for a vocabulary of 2048"),
        (3, 60, {"vocab": 257, "context": 512}, "training tokens, at least"),
    ],
)
def test_too_little_text_is_refused(tmp_path, files, words, settings, sentence):
    folder = write_text(tmp_path / "text", files, words)
    with pytest.raises(UserError) as caught:
        data.load_corpus(Config(**(TINY | settings | {"data": str(folder)})))
    assert sentence in str(caught.value)


def test_batches_are_a_function_of_the_step_and_an_epoch_sees_every_window_once():
    tokens = np.arange(1000, dtype=np.int32)
    settings = Config(**(TINY | {"batch": 3}))
    batches = data.Batches(tokens, settings)
    windows = (1000 - 16) // 16
    starts = []
    for step in range(2 * windows // 3 + 1):
        inputs, targets = batches[step]
        assert inputs.shape == targets.shape == (3, 16)
        assert (targets == inputs + 1).all()  # the tokens count upwards
        starts += inputs[:, 0].tolist()
    assert len(set(starts[:windows])) == windows
    assert len({s % 16 for s in starts[:windows]}) == 1
    fresh = data.Batches(tokens, settings)
    for step in (9, 25, 2):  # any order
        assert (fresh[step][0] == batches[step][0]).all()
    other = data.Batches(tokens, dataclasses.replace(settings, seed=1))
    assert (other[0][0] != batches[0][0]).any()


def naive_bigram(train, inputs, targets, vocab):
    """The same formula with dictionaries."""
    unigram = Counter(train)
    pair = Counter(itertools.pairwise(train))
    followed = Counter(train[:-1])
    kinds = Counter(v for v, _ in pair)
    total = 0.0
    for v, w in zip(inputs, targets, strict=True):
        p = (unigram[w] + 1) / (len(train) + vocab)
        if followed[v]:
            seen = max(pair[v, w] - 0.75, 0.0) / followed[v]
            p = seen + 0.75 * kinds[v] / followed[v] * p
        total -= math.log(p)
    return total / len(targets)


@pytest.mark.parametrize("seed", range(3))
def test_the_bigram_equals_a_naive_one_and_is_a_distribution(seed):
    rng = np.random.default_rng(seed)
    vocab = 23
    # Ids 19 and above never occur in training; 18 only as its last token.
    train = np.append(rng.zipf(1.4, 500) % 18, 18).astype(np.int32)
    inputs, targets = rng.integers(0, vocab, (2, 7, 11))
    ours = baselines.bigram_loss(train, inputs, targets, vocab)
    naive = naive_bigram(train.tolist(), inputs.ravel(), targets.ravel(), vocab)
    assert ours == pytest.approx(naive, rel=1e-12)
    for v in range(vocab):
        losses = [
            baselines.bigram_loss(train, np.array([v]), np.array([w]), vocab) for w in range(vocab)
        ]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1.0, rel=1e-9)


def test_the_unigram_is_add_one_smoothed():
    train = np.array([0, 0, 1], dtype=np.int32)
    loss = baselines.unigram_loss(train, np.array([[0, 2]]), 3)
    assert loss == pytest.approx(-(math.log(3 / 6) + math.log(1 / 6)) / 2)


def test_validation_windows_pair_every_target_with_its_predecessor():
    inputs, targets = data.validation_windows(np.arange(40, dtype=np.int32), 16)
    assert inputs.shape == (2, 16)
    assert (targets == inputs + 1).all()
    assert inputs.ravel().tolist() == list(range(32))


@pytest.mark.parametrize(("limit", "expected"), [(0, 1), (2, 3), (9, 4)])
def test_threads_that_cannot_be_started_are_done_without(monkeypatch, limit, expected):
    started = []
    start = device.threading.Thread.start

    def limited(thread):
        if len(started) == limit:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(device.threading.Thread, "start", limited)
    assert device.startable_threads(4) == expected
    assert not any(thread.is_alive() for thread in started)


def test_the_tokeniser_starts_no_threads(text):
    program = "import lm.data as d, os, sys; d.train_tokenizer(['some text'] * 500, 260); "
    program += "print(len(os.listdir('/proc/self/task')))"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES), "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"


def test_the_device_is_chosen_by_what_can_be_computed(monkeypatch):
    monkeypatch.setattr(device.sonicmoe_cpp, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(config, "memory_bytes", lambda device: 1 << 36)
    large = parse(["--heads", "2"]).config
    assert (large.device, large.precision) == ("cuda", "bf16")
    assert large.width == device.LARGER["width"] and large.heads == 2
    assert parse(["--device", "cpu"]).config.width == Config().width
    monkeypatch.setattr(device.sonicmoe_cpp, "unsupported_reason", lambda device: "no kernels")
    assert parse([]).config.device == "cpu"
    with pytest.raises(UserError, match="device cuda cannot be used: no kernels"):
        parse(["--device", "cuda"])
