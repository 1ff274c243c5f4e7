"""Hooks of MkDocs (mkdocs.yml) for `make docs`. They add README.md as the first page, and copies of
the repository's files that pages link to.

A link that leaves docs/ must name a file that exists. On GitHub the same links work unchanged.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FIRST_PAGE = "index.md"
# Pages of the site that are not in docs/: where they are in the repository, and in the site.
MOVED = {
    "README.md": FIRST_PAGE,
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "emulator/README.md": "emulator-sources.md",
}


def on_files(files, config):
    for path, site in MOVED.items():
        files.append(File.generated(config, site, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    source = next((path for path, site in MOVED.items() if site == uri), f"docs/{uri}")
    folder = posixpath.dirname(source)

    def rewritten(match):
        opening, target, rest = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            site = path.removeprefix("docs/")
        elif path in MOVED:
            site = MOVED[path]
        else:
            site, rest = f"files/{path}", ")"  # the anchor is a line of GitHub's
            if not (ROOT / path).exists():
                raise PluginError(f"{uri} links to {target}, which does not exist")
            if (ROOT / path).is_dir():
                raise PluginError(f"{uri} links to the folder {target}; link to a file")
            if files.get_file_from_path(site) is None:
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, site, content=content))
        return f"{opening}{posixpath.relpath(site, posixpath.dirname(uri) or '.')}{rest}"

    return LINK.sub(rewritten, markdown)
