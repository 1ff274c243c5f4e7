"""The public names of sonic-moe, with their signatures, read from its sources without importing it.

python tests/python/integrations/sonicmoe_names.py RELEASE SOURCE [RELEASE SOURCE ...] > FILE

SOURCE is a wheel, or a folder that holds the package sonicmoe.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

# What users import; the others hold kernels and their launchers.
MODULES = ("", "enums", "count_cumsum", "functional", "functional.utils", "moe")


def read(source: str) -> dict[str, str]:
    """{module: its text}."""
    texts = {}
    for module in MODULES:
        stem = "/".join(["sonicmoe", *filter(None, module.split("."))])
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if source.endswith(".whl"):
                with zipfile.ZipFile(source) as wheel:
                    if path in wheel.namelist():
                        texts[module] = wheel.read(path).decode()
            elif (Path(source) / path).is_file():
                texts[module] = (Path(source) / path).read_text()
    return texts


def parameters(function: ast.FunctionDef) -> list[str]:
    """Their names; one with a default ends in "="."""
    names = [a.arg for a in function.args.args]
    required = len(names) - len(function.args.defaults)
    return [name if i < required else f"{name}=" for i, name in enumerate(names)]


def members(node: ast.ClassDef) -> dict:
    found = {}
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant):
            found[item.targets[0].id] = item.value.value
        elif isinstance(item, ast.FunctionDef) and (item.name[0] != "_" or item.name == "__init__"):
            found[item.name] = parameters(item)
    return found


def names(text: str) -> dict:
    """{name: parameters of a function, members of a class, value of a constant, or "imported"}."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = members(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
        elif isinstance(node, ast.ImportFrom) and node.level > 0:  # from within the package
            found |= {alias.name: "imported" for alias in node.names}
    return {name: value for name, value in found.items() if name[0] != "_"}


def main(arguments: list[str]) -> None:
    releases = zip(arguments[::2], arguments[1::2], strict=True)
    result = {
        release: {module: names(text) for module, text in read(source).items()}
        for release, source in releases
    }
    print(json.dumps(result, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1:])
