#!/usr/bin/env python3
"""Checks in which folders code may be, and how large files and functions are.

    python tools/check_structure.py [ROOT]

Prints one line per finding and exits 1 if there is any. Rules:
  - Torch headers only in python/, asm only in ptx/ folders of src/cuda and of the emulator's
    tests, no CUDA in src/core;
  - folders of src/ include only those that INCLUDES allows them, emulator/ nothing of the library;
  - files of at most 600 lines, functions of at most 100 (200 under src/cuda), 8 parameters;
  - no paths of one machine, no TODO notes, no commented-out code;
  - every record in benchmarks/results/ parses and names a commit of the history.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
MAX_CUDA_FUNCTION_LINES = 200
MAX_PARAMETERS = 8

CPP = {".h", ".cc", ".c", ".cu", ".cuh", ".inc"}
SOURCE = CPP | {".py", ".sh", ".cmake"}
TEXT = SOURCE | {".md", ".txt", ".toml", ".yaml", ".yml", ".in", ".map"}
# CUDA includes these headers too; a macro adds __host__ __device__ there.
HOST_DEVICE_HEADERS = {"src/core/selection_key.h", "src/core/philox.h", "src/core/round_rule.h"}
# This file and its test contain the forbidden patterns.
SELF = {"tools/check_structure.py", "tests/structure_test.py"}

FORBIDDEN = [
    (re.compile(r"(?<![\w.~])/(?:work|root|mnt)/"), "a path of one machine"),
    (re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"), "a note to self"),
]
# A comment that ends like a statement is commented-out code; examples are indented further.
DEAD_CODE = re.compile(
    r"^\s*(?://|#)\s{0,2}(?:"
    r"(?:return|if|for|while|else|std::|auto|const|int|float|double|void|import|from|def)\b.*[;{:]"
    r"|[\w.:>\[\]()-]+\s*(?:[-+*/|&]?=)\s*[^=].*;"
    r"|[\w.:]+\(.*\);"
    r")\s*$"
)
TORCH = re.compile(r"#\s*include\s*[<\"](?:torch|ATen|c10|aten)/")
PTX_FOLDER = re.compile(r"(?:src/cuda/(?:\w+/)?|emulator/tests/)ptx/")
ASM = re.compile(r"\b(?:asm|__asm__)\b(?:\s+volatile)?\s*\(")
CUDA_INCLUDE = re.compile(r"#\s*include\s*[<\"](?:cuda|cub/|thrust/)")
CUDA_CODE = re.compile(r"\b__global__\b|\bcuda[A-Z]\w+\s*\(|<<<")
HOST_DEVICE = re.compile(r"\b__(?:host|device)__\b")

# The folders of src/ from bottom to top, and the folders whose headers each may include besides its
# own. Files in src/ or src/cuda/ itself are the tables of backends and of engines: they may include
# everything. docs/architecture.md draws the same.
INCLUDES = {
    "core": "",
    "cpu": "core",
    "cuda/ptx": "",
    "cuda/device": "",
    "cuda/math": "cuda/ptx",
    "cuda/tma": "cuda/device",
    "cuda/metadata": "cuda/ptx cuda/device",
    "cuda/routing": "core cuda/ptx cuda/device cuda/metadata",
    "cuda/sums": "cuda/ptx cuda/device cuda/math cuda/metadata",
    "cuda/packed": "core cuda/device cuda/math cuda/metadata",
    "cuda/layer": "core cuda/device cuda/math cuda/metadata cuda/packed cuda/sums",
    "cuda/fp8": "core cuda/ptx cuda/device cuda/math cuda/layer",
    "cuda/portable": "core cuda/ptx cuda/device cuda/math cuda/metadata cuda/layer",
    "cuda/hopper": "core cuda/ptx cuda/device cuda/math cuda/tma cuda/metadata cuda/layer cuda/fp8",
    "cuda/blackwell": "core cuda/ptx cuda/device cuda/math cuda/tma cuda/metadata cuda/layer "
    "cuda/fp8 cuda/portable",
    "cuda/exchange": "core cuda/ptx cuda/device cuda/metadata cuda/sums cuda/layer",
    "capi": "core",
    "verify": "core cuda/device",
}
INCLUDE = re.compile(r'^#include "([^"\n]+)"', re.M)

# The header of a function definition: name, parameters, specifiers, open brace.
FUNCTION = re.compile(
    r"(?P<name>[~\w:]+|operator[^\s(]+)\s*\((?P<parameters>[^;{}]*)\)"
    r"(?:\s*(?:const|noexcept|override|final|mutable|->\s*[\w:<>*&, ]+|requires[^{;]*))*"
    r"(?:\s*:\s*[^;{}]*(?:\{[^{}]*\}[^;{}]*)*(?<=[)}]))?\s*\{$",
    re.S,
)
# Functions whose parameters CUDA prescribes; emulator/ implements them.
CUDA_PROTOTYPES = {"cuTensorMapEncodeTiled", "__cudaRegisterFunction"}
NOT_FUNCTIONS = {"if", "for", "while", "switch", "catch", "return", "sizeof", "decltype"}


@dataclass
class Finding:
    path: str
    line: int
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text}"


def without_comments_and_strings(text):
    """The text with blanks for comments and literals; offsets and lines stay the same."""
    pattern = re.compile(
        r'R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S
    )
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def without_preprocessor(code):
    """The text with blanks for directives, whose braces need not balance."""
    return re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        lambda m: re.sub(r"[^\n]", " ", m.group(0)),
        code,
        flags=re.M,
    )


def count_parameters(parameters):
    depth, count = 0, 1 if parameters.strip() not in ("", "void") else 0
    for c in parameters:
        if c in "<([{":
            depth += 1
        elif c in ">)]}":
            depth -= 1
        elif c == "," and depth == 0:
            count += 1
    return count


def cpp_functions(text):
    """(name, first line, lines, parameters) of every function body, by matching braces."""
    code = without_preprocessor(without_comments_and_strings(text))
    stack, start = [], 0  # start: begin of the text before the next brace
    for i, c in enumerate(code):
        if c == "{":
            found = FUNCTION.search(code[start : i + 1])
            head = found if found and found.group("name") not in NOT_FUNCTIONS else None
            stack.append((head, start + found.start() if head else i, start))
            start = i + 1
        elif c == "}":
            head, began, before = stack.pop() if stack else (None, i, i)
            if head:
                first = code.count("\n", 0, began) + 1
                last = code.count("\n", 0, i) + 1
                yield head.group("name"), first, last - first + 1, head.group("parameters")
            braced_member = not head and code[i + 1 :].lstrip()[:1] in (",", "{")
            start = before if braced_member else i + 1
        elif c == ";" and code.count("(", start, i) == code.count(")", start, i):
            start = i + 1


def python_functions(text):
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        found = re.match(r"(\s*)(?:async )?def (\w+)\(", line)
        if not found:
            continue
        indent, last, open_signature = len(found.group(1)), number, True
        for after, body in enumerate(lines[number - 1 :], number):
            if open_signature:
                open_signature = not body.split("#")[0].rstrip().endswith(":")
            elif body.strip() and len(body) - len(body.lstrip()) <= indent:
                break
            if body.strip():
                last = after
        yield found.group(2), number, last - number + 1


def check_sizes(path, text):
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield Finding(path, lines, f"{lines} lines, at most {MAX_FILE_LINES} are allowed")
    allowed = MAX_CUDA_FUNCTION_LINES if path.startswith("src/cuda/") else MAX_FUNCTION_LINES
    if Path(path).suffix in CPP:
        for name, first, length, parameters in cpp_functions(text):
            if length > allowed:
                yield Finding(path, first, f"{name} has {length} lines, at most {allowed}")
            count = count_parameters(parameters)
            if count > MAX_PARAMETERS and name not in CUDA_PROTOTYPES:
                yield Finding(path, first, f"{name} has {count} parameters, at most 8")
    elif path.endswith(".py"):
        for name, first, length in python_functions(text):
            if length > allowed:
                yield Finding(path, first, f"{name} has {length} lines, at most {allowed}")


def check_layers(path, text):
    if Path(path).suffix not in CPP:
        return
    code = without_comments_and_strings(text)
    plain = path.startswith(("src/core/", "include/", "src/cpu/", "src/capi/"))
    marked = plain and path not in HOST_DEVICE_HEADERS
    # Includes stand in quotes, which `code` blanks: look for them in the text itself.
    rules = [
        (not path.startswith("python/"), TORCH, text, "a Torch header outside python/"),
        (
            not PTX_FOLDER.match(path),
            ASM,
            code,
            "asm outside ptx/",
        ),
        (plain, CUDA_INCLUDE, text, "CUDA outside src/cuda/"),
        (plain, CUDA_CODE, code, "CUDA outside src/cuda/"),
        (marked, HOST_DEVICE, code, "CUDA outside src/cuda/"),
    ]
    for applies, pattern, where, sentence in rules:
        found = pattern.search(where) if applies else None
        if found:
            yield Finding(path, where.count("\n", 0, found.start()) + 1, sentence)


def folder_of(header):
    """The key of INCLUDES for a file below src/, "" for files of the tables, None for others."""
    parts = header.split("/")
    folder = "/".join(parts[: 2 if parts[0] == "cuda" else 1])
    if folder in INCLUDES:
        return folder
    return "" if len(parts) <= 2 and parts[0] in ("cuda", Path(header).name) else None


def check_emulator(path, text):
    for found in INCLUDE.finditer(text) if path.startswith("emulator/") else ():
        if "/" in found.group(1) and not found.group(1).startswith("runtime/"):
            line = text.count("\n", 0, found.start()) + 1
            yield Finding(path, line, f"the emulator must not include {found.group(1)}")


def check_includes(path, text):
    if Path(path).suffix not in CPP or not path.startswith("src/"):
        return
    folder = folder_of(path.removeprefix("src/"))
    if folder is None:
        yield Finding(path, 1, "a folder that INCLUDES does not have")
    if not folder:
        return
    allowed = {folder, *INCLUDES[folder].split()}
    for found in INCLUDE.finditer(text):
        header = found.group(1)
        # Headers without a folder are generated, those of sonicmoe/ public.
        if (
            "/" in header
            and not header.startswith("sonicmoe/")
            and folder_of(header) not in allowed
        ):
            line = text.count("\n", 0, found.start()) + 1
            yield Finding(path, line, f"{folder} must not include {header}")


def check_words(path, text):
    for number, line in enumerate(text.split("\n"), 1):
        for pattern, sentence in FORBIDDEN:
            if pattern.search(line):
                yield Finding(path, number, sentence)
        if Path(path).suffix in SOURCE and DEAD_CODE.match(line):
            yield Finding(path, number, "code in a comment")


def check_record(root, path, text):
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        yield Finding(path, error.lineno, f"not JSON: {error.msg}")
        return
    commit = record.get("commit", "") if isinstance(record, dict) else ""
    if not re.fullmatch(r"[0-9a-f]{7,40}", str(commit)):
        yield Finding(path, 1, f"names no commit: {commit!r}")
        return
    known = git(root, "merge-base", "--is-ancestor", commit, "HEAD")
    if known is None:
        yield Finding(path, 1, f"commit {commit} is not in the history")


def git(root, *arguments):
    """Standard output; None if git fails or there is no repository."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def tracked_files(root):
    listing = git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    if listing is None:  # an unpacked archive
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    return sorted(set(listing.split("\n")) - {""})


def check_file(root, path):
    suffix = Path(path).suffix
    is_record = path.startswith("benchmarks/results/") and suffix == ".json"
    if not (suffix in TEXT or is_record) or not (root / path).is_file():
        return
    text = (root / path).read_text(encoding="utf-8")
    if is_record:
        yield from check_record(root, path, text)
    if suffix in SOURCE:
        yield from check_sizes(path, text)
        yield from check_layers(path, text)
        yield from check_includes(path, text)
        yield from check_emulator(path, text)
    if suffix in TEXT and path not in SELF:
        yield from check_words(path, text)


def main(arguments):
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    findings = [f for path in tracked_files(root) for f in check_file(root, path)]
    for finding in findings:
        print(finding)
    print(f"structure: {len(findings)} findings" if findings else "structure: clean")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
