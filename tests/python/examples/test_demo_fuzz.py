"""Mutated command lines and YAML files: each is served or refused by a UserError.

SONICMOE_DEMO_FUZZ=20000 sets the number of cases of each fuzzer; the seeds are 0, 1, 2, ...
"""

import dataclasses
import os
import random

import pytest
from demo_support import TINY, flags, write_text
from lm import data, trainer
from lm.config import Config, parse
from lm.errors import UserError

CASES = int(os.environ.get("SONICMOE_DEMO_FUZZ", "120"))
KEYS = [f.name for f in dataclasses.fields(Config)]
NUMBERS = ["0", "1", "-1", "2", "3", "7", "0.5", "1e-320", "1e308", "1e400", "nan", "inf", "-inf"]
NUMBERS += [str(2**31 - 1), str(2**31), str(2**63), str(2**64), "9" * 5000, "0x" + "f" * 5000]
WORDS = ["", "cpu", "cuda", "up", "bf16", "*", "**", "/etc/*", "..", "[", "**x", "\udcff", "a\nb"]
YAML = ["2001-99-99", '"a\\0b"', '"\\ud800"', "~", "yes", "[1, 2]", "{a: 1}", "[" * 3000]
YAML += ["!!int ''", "!!int _", "!!bool maybe", "!!timestamp x", "!!binary é", "!!set {a}", "&a 1"]
YAML += [
    "*a",
    "1:61:61",
    "<<",
    "!!python/name:os.system",
    "!!float x",
    "|\n  text",
    "- 1",
    "\t",
    "@",
]


def command_line(rng):
    """A few flags with values of all kinds."""
    settings = dict(TINY)
    for key in rng.sample([*KEYS, "resume", "colour"], rng.randint(1, 3)):
        settings[key] = rng.choice(NUMBERS + WORDS)
    return flags(**settings)


def yaml_text(rng):
    lines = [f"{rng.choice([*KEYS, '<<', '? [a]', '1'])}: {rng.choice(NUMBERS + WORDS + YAML)}"]
    lines += [f"{key}: {value}" for key, value in rng.sample(sorted(TINY.items()), 2)]
    rng.shuffle(lines)
    text = "\n".join(lines)
    if rng.random() < 0.3:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice("\0\x85:{}[]&*!|>%@`'\"\t\n") + text[place + 1 :]
    return text


def served(argv):
    """Parses a command line; what is accepted can be found, built and trained for a step. Returns
    whether it was trained."""
    try:
        config = parse(argv).config
        # The standard library takes seconds to read; so do large models to train.
        if not config.data or config.parameters > 1e5 or config.tokens > 1e4:
            return False
        corpus = data.load_corpus(config)
        run = trainer.Run("rounded", config, corpus, data.Path(config.out))
        run.train(lambda: run.step >= 1)
    except UserError as error:
        assert str(error)
        return False
    return True


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with text to work in."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text")
    return tmp_path


@pytest.mark.parametrize("seed", range(3))
def test_mutated_command_lines(place, seed):
    rng = random.Random(seed)
    given = ["--data", "text"]
    cases = [[*given, "--out", f"out{i}", *command_line(rng)] for i in range(CASES // 4)]
    trained = [served(case) for case in cases]
    assert any(trained)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_yaml_files(place, seed):
    rng = random.Random(seed)
    for _ in range(CASES):
        (place / "settings.yaml").write_text(yaml_text(rng), errors="surrogateescape")
        try:
            parse(["--config", "settings.yaml", "--device", "cpu"])
        except UserError as error:
            assert str(error)
