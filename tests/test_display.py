"""Tables as text and as HTML."""

from __future__ import annotations

from fedskew.display import html_table, text_table

RECORDS = [{"name": "a<b", "count": 7, "share": 0.123456}, {"name": "longer", "count": 12, "share": None}]


def test_text_columns_line_up() -> None:
    assert text_table(RECORDS).splitlines() == [
        "name    count  share",
        "a<b         7  0.1235",
        "longer     12  –",
    ]


def test_html_is_escaped() -> None:
    html = html_table(RECORDS, caption="x & y")
    assert "<caption>x &amp; y</caption>" in html
    assert "<td>a&lt;b</td><td>7</td><td>0.1235</td>" in html
