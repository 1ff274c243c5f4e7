"""Writes docs/api.md, the C++ and C reference, from the comments of include/sonicmoe/*.h.

A header's opening comment introduces it; every struct, and every declaration with a `///` comment
before it, is an entry: its comment, then its code as it stands in the header. The C interface says
the same in other words: of it, only the rules are shown.

    python tools/api_reference.py           rewrite docs/api.md
    python tools/api_reference.py --check   exit 1 where it is not current
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("status", "types", "moe", "routing", "grouped_gemm", "version", "c_api")
TARGET = ROOT / "docs/api.md"
NAME = re.compile(r"(?:struct|class|enum class|enum)\s+(\w+)\s*[{:;]|(\w+)\s*\(|(\w+)\s*(?:=|;)")


def introduction(lines):
    """The comment that opens a header, as a paragraph each for its paragraphs."""
    text = []
    for line in lines:
        if not line.startswith(("//", "/*", " *")) or line == " */":
            break
        text.append(line[2:].removeprefix(" "))
    return "\n".join(text).strip()


def declaration(lines, start):
    """The lines of the declaration that begins at `start`: to its `;` outside braces and parens."""
    depth = 0
    for end in range(start, len(lines)):
        code = re.sub(r"//.*", "", lines[end]).rstrip()
        depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
        if depth == 0 and code.endswith((";", "}")):
            return lines[start : end + 1]
    raise SystemExit(f"no end of the declaration: {lines[start]}")


def entries(lines):
    """(name, comment, code) of every documented declaration at namespace level."""
    at = 0
    while at < len(lines):
        if not lines[at].startswith(("///", "struct ")):
            at += 1
            continue
        comment = []
        while lines[at].startswith("///"):
            comment.append(lines[at][3:].strip())
            at += 1
        if lines[at].startswith("#"):
            continue
        code = declaration(lines, at)
        at += len(code)
        while at < len(lines) and lines[at].startswith("SONICMOE_API"):  # "and back"
            more = declaration(lines, at)
            code += more
            at += len(more)
        found = NAME.search(re.sub(r"SONICMOE_API|SMOE_API|__attribute__\(\(.*?\)\)", "", code[0]))
        name = next(group for group in found.groups() if group) if found else code[0].strip()
        yield name, " ".join(comment), code


def reference():
    parts = [
        "# Reference",
        "Written by `tools/api_reference.py` from the headers in `include/sonicmoe/`, which say the"
        " same.",
    ]
    for header in HEADERS:
        lines = (ROOT / f"include/sonicmoe/{header}.h").read_text().splitlines()
        parts += [f"## sonicmoe/{header}.h", introduction(lines)]
        for name, comment, code in entries(lines):
            parts += [f"### `{name}`", comment, "```cpp\n" + "\n".join(code) + "\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = reference()
    if not parser.parse_args().check:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        print("docs/api.md is not current: run python tools/api_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
