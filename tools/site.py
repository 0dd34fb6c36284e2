"""What mkdocs does beside its own: notebooks become pages, and links that leave docs/ become words.

The site is read offline and knows no place where the repository lies, so a link to a source file is its path. Named in mkdocs.yml (`hooks`).
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")

OUTSIDE = re.compile(r"<(?:script|img|iframe|link(?=[^>]*stylesheet))[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
NOTEBOOK = re.compile(r"\]\(([^):]+)\.ipynb\)")


def as_page(notebook: dict[str, Any], name: str) -> str:
    """A notebook's cells as Markdown, with what they printed and drew."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if text := "".join(output.get("text", output.get("data", {}).get("text/plain", []))).rstrip():
                parts.append(f"```text\n{text}\n```")
            if picture := output.get("data", {}).get("image/png"):
                parts.append(f"![](data:image/png;base64,{''.join(picture).strip()})")
    parts.append(f"*This page is a notebook, `docs/notebooks/{name}.ipynb`; the suite executes it.*")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Notebooks are pages."""
    for path in sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        old = files.get_file_from_path(f"notebooks/{path.name}")
        if old:
            files.remove(old)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=as_page(notebook, path.stem)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ become the path in the repository, links to notebooks those to their pages."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def words(found: re.Match[str]) -> str:
        label, target = found[1], posixpath.normpath(posixpath.join(here, found[2]))
        if target.startswith("docs/") or target == "docs":
            return found[0]
        plain = label.strip("`")
        return f"`{target}`" if plain in (target, posixpath.basename(target)) else f"{label} (`{target}`)"

    return NOTEBOOK.sub(r"](\1.md)", LINK.sub(words, markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """No page loads anything from elsewhere: the site is read offline, and nobody learns who reads it."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := OUTSIDE.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.name} loads something from elsewhere: {found[0]}")
