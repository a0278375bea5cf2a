"""Destination of the lines of a file that is written as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from aioserve.simulation.request_rows import whole_file


def test_what_a_link_to_an_open_pipe_leads_to_is_written_to_at_once(tmp_path: Path) -> None:
    link = tmp_path / "lines.csv"
    reading, writing = os.pipe()
    link.symlink_to(f"/proc/self/fd/{writing}")
    with os.fdopen(reading) as lines, os.fdopen(writing, "w"):
        with whole_file("requests", link) as file:
            file.write("a,b\n")
        assert lines.readline() == "a,b\n"
    assert list(tmp_path.iterdir()) == [link]


def test_a_link_that_leads_nowhere_yet_stays_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.csv", tmp_path / "target.csv"
    link.symlink_to(target)
    with whole_file("requests", link) as file:
        file.write("a,b\n")
        assert not target.exists()
    assert link.is_symlink()
    assert target.read_text() == "a,b\n"
