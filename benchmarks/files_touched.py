"""Shows how far a change reaches: the files that commits touch, by the room that they are in.

    python benchmarks/files_touched.py COMMIT [COMMIT ...] [--room aioserve/kv/groups] [--json FILE]

Several commits count as one change: a file that two of them touch is one file. A room is a folder
of `aioserve`, `plugins` or `native`, or another folder at the top. The option `--room` names the
room that the change is made for; files outside are counted apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
SPLIT = ("aioserve", "plugins", "native")
"""Folders whose own folders are rooms."""
PRINTED = ("--no-renames", "--numstat", "--format=")


@dataclass
class Touched:
    """One file of a change."""

    file: str
    added: int = 0
    """Lines; 0 for a binary file."""
    removed: int = 0

    @property
    def room(self) -> str:
        first, *rest = PurePosixPath(self.file).parts
        if first in SPLIT and len(rest) > 1:
            return f"{first}/{rest[0]}"
        return first


def touched(commits: Iterable[str], root: Path = ROOT) -> list[Touched]:
    """Return the files that the commits touch, in the order of their names.

    Raises `SystemExit` for a commit that git doesn't know.
    """
    files: dict[str, Touched] = {}
    for commit in commits:
        command = [
            "git",
            "show",
            "--first-parent",
            "--no-renames",
            "--numstat",
            "--format=",
            commit,
        ]
        done = subprocess.run([*command, "--"], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"commit {commit}: {done.stderr.strip()}")
        for line in done.stdout.splitlines():
            added, removed, file = line.split("\t")
            one = files.setdefault(file, Touched(file))
            one.added += int(added) if added != "-" else 0
            one.removed += int(removed) if removed != "-" else 0
    return [files[file] for file in sorted(files)]


def table(files: Sequence[Touched], room: str | None = None) -> str:
    """Return a table of the files of each room, and how many of the package are outside of
    `room`.
    """
    rooms: dict[str, list[Touched]] = defaultdict(list)
    for one in files:
        rooms[one.room].append(one)
    lines: list[str] = []
    for name, own in sorted(rooms.items()):
        added, removed = sum(one.added for one in own), sum(one.removed for one in own)
        lines.append(f"{name:24} {len(own):3} files {added:+6} {-removed:+6}")
        lines += [f"    {one.file}" for one in own]
    of_package = [one for one in files if one.file.startswith(SPLIT)]
    lines.append(f"{len(files)} files, {len(of_package)} of the package")
    if room is not None:
        outside = [one for one in of_package if not PurePosixPath(one.file).is_relative_to(room)]
        lines.append(f"{len(outside)} of the package outside of {room}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    parser.add_argument("--room", help="the folder that the change is made for")
    parser.add_argument("--json", type=Path, help="write the files there, too")
    options = parser.parse_args(arguments)
    files = touched(options.commits)
    print(table(files, options.room))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in files], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
