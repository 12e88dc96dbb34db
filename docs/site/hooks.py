"""Hooks of mkdocs: the pages of the site that are no files of docs/, and links that leave it.

* README.md is the first page, CONTRIBUTING.md and CHANGELOG.md are pages of "Project".
* The reference is generated (`reference.py`).
* A file outside of docs/ that a page links to becomes a page with its text: the site is whole without a network.
* What material would fetch is beside the pages.
* Comments that only the tests read (setup, not run, slow) are left out.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import reference
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "project/contributing.md", "CHANGELOG.md": "project/changelog.md"}
"""Files at the top of the repository, and the pages that they become."""

ORIGINS = {page: name for name, page in COPIED.items()}
LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
COMMENT = re.compile(r"^<!-- (?:setup|not run|slow|npu)\b.*?-->\n", re.MULTILINE | re.DOTALL)
SHIM, OWN_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
"""What material fetches for the search in pages that are opened as files, and the copy that is used in its place."""

LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    pages = {page: (ROOT / name).read_text() for name, page in COPIED.items()}
    pages |= {f"reference/{name}.md": make() for name, make in reference.PAGES.items()}
    own = {f.src_uri: (ROOT / "docs" / f.src_uri).read_text() for f in files.documentation_pages()}
    for page, text in {**own, **pages}.items():
        for match in LINK.finditer(text):
            path = _path(match[2], page)
            if path and (ROOT / path).is_file() and not path.startswith("docs/") and path not in COPIED:
                pages[f"source/{path}.md"] = _source_page(path)
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leaves the tests' comments out, and turns links into those of the site."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    if here == "options.md":
        markdown += "\n" + reference.options()

    def to_site(match: re.Match[str]) -> str:
        path = _path(match[2], here)
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():  # which the site does not have
            return match[1][1:-2]
        target = path.removeprefix("docs/") if path.startswith("docs/") else COPIED.get(path, f"source/{path}.md")
        return f"{match[1]}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[3] or ''})"

    return LINK.sub(to_site, COMMENT.sub("", markdown))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is fetched."""
    return output.replace(SHIM, posixpath.relpath(OWN_SHIM, posixpath.dirname(page.file.src_uri) or "."))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Nor by the page of a wrong address."""
    return output.replace(SHIM, OWN_SHIM)


def _path(target: str, page: str) -> str | None:
    """What a page of the site links to, as a path from the top of the repository; None where nothing is there."""
    origin = ORIGINS.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return path if (ROOT / path).exists() else None


def _source_page(path: str) -> str:
    """A page that shows a file, left out of the search."""
    text = (ROOT / path).read_text().rstrip()
    if path.endswith(".md"):
        shown = LINK.sub(lambda match: match[1][match[1].index("[") + 1 : -2], text)
    else:
        shown = f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"
    return f"---\nsearch:\n  exclude: true\n---\n{shown}"
