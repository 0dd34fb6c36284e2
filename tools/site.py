"""What mkdocs does beside its own: notebooks become pages, and links that leave docs/ become words.

The site is read offline and knows no place where the repository lies, so a link to a source file is its path, and diagrams that GitHub draws (it has
mermaid) are lists. Named in mkdocs.yml (`hooks`).
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
FILE_NAME = re.compile(r"\[([\w-]+\.md)\]\(([^)#\s]+\.md)(#[^)\s]*)?\)")
DIAGRAM = re.compile(r"^```mermaid\n(\w+)[^\n]*\n(.*?)^```\n", re.M | re.DOTALL)
BOX = re.compile(r"(\w+)(?:\[\"([^\"]*)\"\])?")
SHELL = re.compile(r"<div class=\"language-sh .*?</div>", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
PICTURE = re.compile(r"<img [^>]*?src=\"(?!data:)([^\"]+)\"[^>]*>")
WIDE = {
    "index.md": ["navigation", "toc"],
    "algorithms.md": ["toc"],
    "configuration.md": ["toc"],
    "licences.md": ["toc"],
}
"""Pages whose tables, or whose picture, need the room of what stands beside others."""


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


def as_list(diagram: re.Match[str]) -> str:
    """A diagram in words: its arrows, one a line."""
    kind, lines = diagram[1], [line.strip() for line in diagram[2].splitlines()]
    if kind == "sequenceDiagram":
        names = dict(re.findall(r"participant (\w+) as (.+)", diagram[2]))
        steps = [re.fullmatch(r"(\w+)-+>>(\w+): (.+)", line) for line in lines]
        return "".join(
            f"1. **{names[s[1]]}**{'' if s[1] == s[2] else f' → **{names[s[2]]}**'}: {s[3]}\n" for s in steps if s
        )
    words = {name: label for line in lines for name, label in BOX.findall(line) if label}
    arrows: dict[str, list[str]] = {}
    for line in lines:
        above, below = (re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", part)) for part in line.split("-->"))
        for name in above:
            arrows.setdefault(name, []).extend(f"`{one}`" for one in below)
    rows = [
        f"| `{name}` | {words.get(name, '').partition(': ')[2]} | {', '.join(to)} |\n" for name, to in arrows.items()
    ]
    return f"| folder | what it is | imports from |\n|---|---|---|\n{''.join(rows)}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ become the path in the repository, links to notebooks those to their pages; who links to a page by its
    file's name gets its title."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    page.meta.setdefault("hide", WIDE.get(page.file.src_uri, []))

    def words(found: re.Match[str]) -> str:
        label, target = found[1], posixpath.normpath(posixpath.join(here, found[2]))
        if target.startswith("docs/") or target == "docs":
            return found[0]
        plain = label.strip("`")
        return f"`{target}`" if plain in (target, posixpath.basename(target)) else f"{label} (`{target}`)"

    def title(found: re.Match[str]) -> str:
        file = files.get_file_from_path(posixpath.normpath(posixpath.join(here, found[2]))[len("docs/") :])
        called = file.page.title if file and file.page else None
        return f"[{called}]({found[2]}{found[3] or ''})" if called else found[0]

    return DIAGRAM.sub(as_list, FILE_NAME.sub(title, NOTEBOOK.sub(r"](\1.md)", LINK.sub(words, markdown))))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A picture is a link to itself: on a phone its words can be read. An option is not broken at its hyphens."""
    html = SHELL.sub(lambda block: OPTION.sub(r'<span class="option">\1</span>', block[0]), html)
    return PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', html)


def on_post_build(config: MkDocsConfig) -> None:
    """No page loads anything from elsewhere: the site is read offline, and nobody learns who reads it."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := OUTSIDE.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.name} loads something from elsewhere: {found[0]}")
