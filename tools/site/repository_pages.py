"""Pages of the site that are files of the repository, and the links between them.

Markdown files stay where GitHub shows them, with links that work there. On the site, every file has an address:

    README.md                     index.md
    docs/NAME.md, docs/images/    NAME.md, images/
    RESULTS.md and others         results.md
    benchmarks/NAME.md            benchmarks/NAME.md
    any other linked file         source/PATH.md, a page that shows it
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "README.md": "index.md",
    "RESULTS.md": "results.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
IMAGES = (".png", ".svg")
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(`{3,})(\w+)((?: [^`]+)?)$")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".csv": "text", ".conf": "nginx"}


def site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in TOP_LEVEL:
        return TOP_LEVEL[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/") and path.endswith(".md"):
        return path.replace("README.md", "index.md")
    return path if path.endswith(IMAGES) else f"source/{path}.md"


def markdown_files() -> list[str]:
    """The Markdown files of the repository that become pages."""
    found = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    tracked = (path.relative_to(ROOT).as_posix() for path in found)
    return sorted([*TOP_LEVEL, *(path for path in tracked if "/." not in path)])


def adapt(text: str, path: str) -> str:
    """The text of a Markdown file with links and code blocks as the site needs them."""
    return "\n".join(
        _adapt_fence(line) if is_code else _LINK.sub(lambda link: _adapt_link(link, path), line)
        for line, is_code in _lines(text)
    )


def linked_files() -> dict[str, str]:
    """Repository paths that pages link to and that are no pages themselves, by their place on the site."""
    linked = set()
    for path in markdown_files():
        for line, is_code in _lines((ROOT / path).read_text(encoding="utf-8")):
            linked |= {_resolve(match[1], path) for match in _LINK.finditer(line) if not is_code}
    pages = set(markdown_files())
    return {site_path(path): path for path in sorted(linked - pages) if not path.startswith("docs/")}


def show_file(path: str) -> str:
    """A page that shows a file, a notebook or what a folder has."""
    target = ROOT / path
    if target.suffix == ".ipynb":
        return adapt(notebook_page(target), path)
    header = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if target.is_dir():
        names = sorted(child.name for child in target.iterdir() if not child.name.startswith(("_", ".")))
        return header + "".join(f"- `{name}`\n" for name in names)
    language = _LANGUAGES.get(target.suffix, "text")
    return f"{header}~~~~~~~~ {language}\n{target.read_text(encoding='utf-8').rstrip()}\n~~~~~~~~\n"


def notebook_page(path: Path) -> str:
    """An executed notebook as Markdown: its text, its code, and outputs as text or pictures."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts.extend(filter(None, map(_show_output, cell.get("outputs", ()))))
    return "\n\n".join(parts) + "\n"


def _show_output(output: dict) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![The output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", ()) or data.get("text/plain", ()))
    return f"~~~~~~~~ text\n{text.rstrip()}\n~~~~~~~~" if text.strip() else ""


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """The lines, and whether each belongs to a code block."""
    is_code = False
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        yield line, is_code or is_fence
        is_code ^= is_fence


def _resolve(target: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _adapt_link(link: re.Match[str], path: str) -> str:
    start = posixpath.dirname(site_path(path))
    return f"]({posixpath.relpath(site_path(_resolve(link[1], path)), start or '.')}{link[2] or ''})"


def _adapt_fence(line: str) -> str:
    """```bash run``` becomes ```bash```, and `file=NAME` becomes the title of the block."""
    found = _FENCE.match(line)
    if not found:
        return line
    file = re.search(r"file=(\S+)", found[3])
    return f"{found[1]}{found[2]}" + (f' title="{file[1]}"' if file else "")
