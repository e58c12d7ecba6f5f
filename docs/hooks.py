"""MkDocs hooks: add linked files from outside docs/, and reject pages that load remote content.

Pages link to files of the repository by relative paths, so that the links also work in the
repository itself. On the site, each file keeps the path that it has in the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")
# The comment before a figure within a sentence (see docs/tables.py). Markdown would read the square
# brackets in the comment as link references.
MARKER = re.compile(r"<!-- [^<>]*\{[^<>]* -->")
LOADED = re.compile(
    r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root, and every file outside docs/ that a page links to."""
    repository, docs = _directories(config)
    wanted = [repository / "CHANGELOG.md", repository / "CONTRIBUTING.md"]
    for file in files.documentation_pages():
        page = Path(file.abs_src_path or "")
        targets = (_target(page, link) for link in LINK.findall(file.content_string))
        wanted += [path for path in targets if not path.is_relative_to(docs) and path.is_file()]
    for path in dict.fromkeys(wanted):
        name = path.relative_to(repository).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the comments before figures, and turn links to files into links within the site."""
    repository, docs = _directories(config)
    source = Path(page.file.abs_src_path or "")

    def within_site(match: re.Match[str]) -> str:
        target = _target(source, match[0])
        root = docs if target.is_relative_to(docs) else repository
        if not target.is_relative_to(root):
            return match[0]
        here = os.path.dirname(page.file.src_uri)
        return os.path.relpath(target.relative_to(root).as_posix(), here)

    return LINK.sub(within_site, MARKER.sub("", markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raise PluginError if a page would load something from another host."""
    for loaded in LOADED.findall(output):
        raise PluginError(f"{page.file.src_uri}: loads from outside the site: {loaded}")
    return output


def _directories(config: MkDocsConfig) -> tuple[Path, Path]:
    docs = Path(config.docs_dir)
    return docs.parent, docs


def _target(page: Path, link: str) -> Path:
    return Path(os.path.normpath(page.parent / link))
