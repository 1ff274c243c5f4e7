"""Mutated command lines, YAML files and checkpoints: each is served or refused by a UserError.

SONICMOE_DEMO_FUZZ=20000 sets the number of cases of each fuzzer; the seeds are 0, 1, 2, ...
"""

import copy
import dataclasses
import json
import math
import os
import random
import shutil

import pytest
import torch
from demo_support import TINY, flags, write_text
from lm import data, trainer
from lm.config import Config, parse
from lm.errors import UserError
from safetensors.torch import load_file, save_file

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


STRANGE = [None, True, -1, 0, 1, 1.5, 2**70, math.nan, math.inf, "", "x", [], [0], {}, {"a": 1}]


def nodes(value):
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((value, key))
        if isinstance(item, dict | list):
            found += nodes(item)
    return found


def mutate_state(path, rng):
    """Removes, replaces or adds an entry of state.json, or damages its bytes."""
    file = path / "state.json"
    state = json.loads(file.read_text())
    container, key = rng.choice(nodes(state))
    kind = rng.randrange(4)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = copy.deepcopy(rng.choice(STRANGE))
    elif kind == 2 and isinstance(container, dict):
        container["more"] = rng.choice(STRANGE)
    raw = bytearray(json.dumps(state).encode())
    if kind == 3:
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    file.write_bytes(raw)


def strange_tensor(value, rng):
    """Another shape, dtype or value."""
    changes = (
        lambda: value[..., :-1] if value.ndim else value.expand(3),
        lambda: value.reshape(-1)[:1],
        lambda: value.unsqueeze(0),
        lambda: value.to(torch.float64),
        lambda: value.to(torch.bfloat16),
        lambda: value.to(torch.int32),
        lambda: torch.full_like(value, math.nan if value.is_floating_point() else 0),
        lambda: -value.abs() - 1,
        lambda: value.new_empty(0),
        lambda: value.T if value.ndim == 2 else value.flatten(),
    )
    return rng.choice(changes)().contiguous().clone()


def mutate_tensors(path, rng):
    """Removes, adds, renames or changes a tensor, or damages bytes of the file."""
    file = path / rng.choice(["model.safetensors", "optimizer.safetensors"])
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    name = rng.choice(sorted(tensors))
    kind = rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[rng.choice(["0", "0.", "x.y", "99.exp_avg", "-1.step", "0.max_exp_avg_sq"])] = (
            torch.ones(2)
        )
    elif kind == 2:
        tensors[rng.choice(["0.exp_avg.x", "1", "head"])] = tensors.pop(name)
    elif kind == 3:
        tensors[name] = strange_tensor(tensors[name], rng)
    save_file(tensors, file)
    raw = bytearray(file.read_bytes())
    if kind == 4:
        raw[rng.randrange(400)] = rng.randrange(256)
    elif kind == 5:
        del raw[rng.randrange(len(raw)) :]
    file.write_bytes(raw)


@pytest.mark.parametrize("mutate", [mutate_state, mutate_tensors])
def test_mutated_checkpoints(tmp_path, mutate):
    text = write_text(tmp_path / "text")
    config = Config(**(TINY | {"data": str(text), "layers": 1, "width": 4, "expert_width": 2}))
    corpus = data.load_corpus(config)
    first = trainer.Run("topk", config, corpus, tmp_path / "first")
    first.train(lambda: first.step >= 5)
    (path,) = (tmp_path / "first").glob("step-*")
    refused = 0
    run = trainer.Run("topk", config, corpus, tmp_path / "mutated")
    rng = random.Random(0)
    for _ in range(CASES):
        shutil.rmtree(tmp_path / "mutated")
        shutil.copytree(path, tmp_path / "mutated" / path.name)
        mutate(tmp_path / "mutated" / path.name, rng)
        before = [value.clone() for value in run.model.state_dict().values()]
        try:
            assert run.restore()
            run._train_step()
        except UserError:
            refused += 1
            after = run.model.state_dict().values()
            assert all(map(torch.equal, before, after))  # all is checked before any is used
    assert refused > CASES // 2
