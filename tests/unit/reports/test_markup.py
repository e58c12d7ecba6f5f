"""Tables of figures on the page are narrow enough to read."""

from __future__ import annotations

import re

import pytest

from reports.markup import MAX_COLUMNS, narrow_tables


@pytest.mark.parametrize("columns", [2, 8, 9, 14, 16, 30])
def test_a_wide_table_is_divided_and_each_part_names_the_rows(columns):
    header = [f"c{i}" for i in range(columns)]
    page = narrow_tables(header, [[f"{row}{title}" for title in header] for row in "ab"])

    tables = [re.findall(r"<tr>.*?</tr>", part, re.DOTALL) for part in page.split("</table>")[:-1]]
    parts = [[re.findall(r">([^<\n]+)<", row) for row in rows] for rows in tables]
    assert len(parts) == -(-(columns - 1) // (MAX_COLUMNS - 1))
    assert all(len(row) <= MAX_COLUMNS for rows in parts for row in rows)
    assert [title for titles, *_ in parts for title in titles[1:]] == header[1:]
    for titles, first, second in parts:
        assert titles[0] == "c0"
        assert first == [f"a{title}" for title in titles]
        assert second == [f"b{title}" for title in titles]
