"""Writes docs/api.md, the C++ and C reference, from the comments of include/sonicmoe/*.h.

The first comment of a header becomes its introduction. Every declaration at namespace level is
copied under the comment before it; declarations without a blank line between them form one entry.

    python tools/api_reference.py           rewrite docs/api.md
    python tools/api_reference.py --check   exit 1 if it is not current
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = (
    "status",
    "types",
    "moe",
    "low_rank",
    "routing",
    "grouped_gemm",
    "exchange",
    "version",
    "c_api",
)
TARGET = ROOT / "docs/api.md"
NAME = re.compile(
    r"(?:struct|class|enum class)\s+(\w+)\s*[{:;]|typedef (?:struct )?\w+ (\w+);|(\w+)\s*\("
    r"|enum {\s*(\w+)|(\w+)\s*="
)
MACROS = re.compile(r"SONICMOE_API|SMOE_API|__attribute__\(\(.*?\)\)")
# An item of a list, and a text whose last line is one.
ITEM = re.compile(r"- |\d+\. |\|")
LAST_IS_ITEM = re.compile(r"(^|\n)(- |\d+\. |\|)[^\n]*$")
# Lines that open or close a scope and declare nothing.
SCOPES = ("#", "namespace", 'extern "C"', "}", "//", "/* extern")


def introduction(lines, language):
    """The first comment of a header. Indented lines after a line that ends with ":" are code."""
    text, is_code = [], False
    for line in lines:
        if not line.startswith(("//", "/*", " *")) or line == " */":
            break
        words = line[2:].removeprefix(" ")
        if words.startswith("  ") and text and text[-1].endswith(":"):
            text += ["", f"```{language}"]
            is_code = True
        elif is_code and not words.startswith("  "):
            text.append("```")
            is_code = False
        text.append(words[2:] if is_code else words)
    return "\n".join([*text, "```"] if is_code else text).strip()


def declaration(lines, start):
    """The lines of the declaration at `start`, up to its `;` outside of braces and parentheses."""
    depth = 0
    for end in range(start, len(lines)):
        code = re.sub(r"//.*|/\*.*?\*/", "", lines[end]).rstrip()
        depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
        if depth == 0 and code.endswith((";", "}")):
            return lines[start : end + 1]
    raise SystemExit(f"no end of the declaration: {lines[start]}")


def comment_at(lines, start):
    """Text and number of lines of the documenting comment at `start`."""
    end = start
    if lines[start].startswith("/* "):
        while not lines[end].endswith("*/"):
            end += 1
        end += 1
    while lines[end].startswith("///"):
        end += 1
    words = [re.sub(r"^(///|/\*| \*)|\*/$", "", line).strip() for line in lines[start:end]]
    return paragraphs(words), end - start


def paragraphs(lines):
    """Joins lines, but not those of two paragraphs, and no item of a list with the line before."""
    text = ""
    for line in lines:
        if not line:
            text += "\n\n"
        elif ITEM.match(line):
            text += f"\n{line}" if LAST_IS_ITEM.search(text) else f"\n\n{line}"
        else:
            text += line if not text or text.endswith("\n") else f" {line}"
    return text.strip()


def names_of(code):
    """The name that a declaration declares."""
    found = NAME.search(MACROS.sub("", " ".join(code)))
    if not found:
        raise SystemExit(f"no name in the declaration: {code[0]}")
    return next(group for group in found.groups() if group)


def entries(lines):
    """(names, comment, code) of the declarations at namespace level, by entry."""
    at = next(i for i, line in enumerate(lines) if not line.startswith(("//", "/*", " *")))
    names, comment, code = [], "", []
    for end in range(at, len(lines) + 1):
        if end < at:
            continue
        line = lines[end] if end < len(lines) else ""
        documents = line.startswith(("/// ", "/* ")) and not line.startswith("/* extern")
        if (documents or not line.strip()) and code:
            yield names, comment, code
            names, comment, code = [], "", []
        if documents:
            comment, length = comment_at(lines, end)
            at = end + length
        elif line.strip() and not line.startswith((" ", *SCOPES)):
            more = declaration(lines, end)
            names.append(names_of(more))
            code += more
            at = end + len(more)


def reference():
    parts = [
        "# Reference",
        "The C++ interface, then [the C interface](#sonicmoec_apih). Written by"
        " `tools/api_reference.py` from the headers in `include/sonicmoe/`.",
    ]
    for header in HEADERS:
        lines = (ROOT / f"include/sonicmoe/{header}.h").read_text().splitlines()
        language = "c" if header == "c_api" else "cpp"
        parts += [f"## sonicmoe/{header}.h", introduction(lines, language)]
        for names, comment, code in entries(lines):
            heading = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
            block = "\n".join(code)
            parts += [f"### {heading}", comment, f"```{language}\n{block}\n```"]
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
