"""Hooks of MkDocs: they add the generated pages, and adapt links of the repository's Markdown files.

`make docs` builds the site. `mkdocs serve` shows it while you write.
"""

from __future__ import annotations

import re
from typing import Any

from method_pages import method_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference_pages import api_pages, command_pages, configuration_page
from repository_pages import IMAGES, ROOT, adapt, linked_files, markdown_files, show_file, site_path

_SOURCES = {site_path(path): path for path in markdown_files()}
"""Repository paths of the Markdown pages, by their place on the site."""


def generated_pages() -> dict[str, str]:
    """The text of all pages that no file of the repository has."""
    return {"configuration.md": configuration_page(), **command_pages(), **api_pages(), **method_pages()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add to the navigation what mkdocs.yml does not name: generated pages, benchmarks, and new pages of docs/."""
    config.extra["generated"] = pages = generated_pages()
    sections = {title: pages for section in config.nav for title, pages in section.items()}
    for title, folder in (("Methods", "methods/"), ("Command line", "commands/"), ("Python API", "api/")):
        sections["Reference"].append({title: [path for path in pages if path.startswith(folder)]})
    benchmarks = [path for path in _SOURCES if path.startswith("benchmarks/")]
    sections["Explanation"].append(
        {"Benchmarks": sorted(benchmarks, key=lambda path: (path != "benchmarks/index.md", path))}
    )
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    sections["How-to"].extend(path for path in _SOURCES if path not in named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in config.extra["generated"].items():
        files.append(File.generated(config, path, content=text))
    for path, source in _SOURCES.items():
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    for path, source in linked_files().items():
        if path.endswith(IMAGES):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
        else:
            files.append(File.generated(config, path, content=show_file(source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    source = _SOURCES.get(page.file.src_uri)
    return adapt(markdown, source) if source else markdown
