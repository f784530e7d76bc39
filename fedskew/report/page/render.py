"""Render a report as one self-contained HTML file.

The Plotly library and the charts are compressed, and the browser decompresses them. Without compression, the library
alone would add about five megabytes.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from fedskew import __version__
from fedskew.errors import UserError
from fedskew.report.charts.palette import colour
from fedskew.report.charts.plotly_view import plotly
from fedskew.report.charts.table import Cell, Table
from fedskew.report.document import Document


def page(document: Document, live: bool = False) -> str:
    """Render the whole page. A live page gets Plotly and all updates from its server."""
    template = _environment().get_template("page.html")
    return template.render(
        document=document,
        version=__version__,
        live=live,
        body=body(document),
        css=_text("page.css"),
        js=_text("page.js"),
        plotly="" if live else packed_plotly(),
        charts=_packed(json.dumps(charts(document), allow_nan=False, separators=(",", ":")).encode()),
    )


def body(document: Document) -> Markup:
    """Render the content of the page's <main>."""
    methods = list({method.label: method for chapter in document.chapters for method in chapter.methods}.values())
    return Markup(_environment().get_template("body.html").render(document=document, methods=methods))


def charts(document: Document) -> dict[str, Any]:
    """The charts and tables for the page's script."""
    drawn = [chart for figure in document.figures for chart in figure.charts]
    tables = [
        *(chart.table() for chart in drawn),
        *(table for section in document.sections for table in section.tables),
    ]
    return {"charts": {chart.key: plotly(chart) for chart in drawn}, "tables": {t.key: _table(t) for t in tables}}


def _table(table: Table) -> dict[str, Any]:
    return {"caption": table.caption, "columns": list(table.columns), "rows": [list(row) for row in table.rows]}


@lru_cache(maxsize=1)
def plotly_program() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError("the report needs Plotly: install fedskew[report]") from error
    return str(get_plotlyjs())


@lru_cache(maxsize=1)
def packed_plotly() -> Markup:
    return _packed(plotly_program().encode())


def _packed(content: bytes) -> Markup:
    """Compress with gzip, and encode as base64. Base64 needs no escaping in HTML."""
    return Markup(base64.b64encode(gzip.compress(content, 9, mtime=0)).decode())


def _text(name: str) -> Markup:
    """Read a file of this package."""
    return Markup(files("fedskew.report.page").joinpath(name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedskew.report.page", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": _cell, "colour": colour}
    return environment


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e5 else str(value)
