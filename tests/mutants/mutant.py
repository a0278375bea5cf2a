"""A planted bug: which trap it stands for, what it changes, and which tests find it."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["PLANTED", "ROOT", "Mutant", "StaleMutantError", "load_mutants"]

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).parent / "planted"


class StaleMutantError(Exception):
    """The text that a mutant replaces is no longer there, or more than once."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of `planted/`; its name is the file's."""

    trap: str
    """Harm that the bug did where it shipped, or would do."""
    file: str
    """Path from the root of the repository."""
    find: str
    """Occurs exactly once in the file."""
    replace: str
    tests: tuple[str, ...]
    """Paths or ids for pytest. At least one test must fail with the bug."""
    name: str = ""

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")

    def planted_in(self, source: str) -> str:
        """The file's text with the bug. Raises `StaleMutantError`."""
        count = source.count(self.find)
        if count != 1:
            raise StaleMutantError(
                f"{self.name}: {self.file} has {count} times, not once, the text\n{self.find}"
            )
        return source.replace(self.find, self.replace)


def load_mutants() -> list[Mutant]:
    """All of them, by name."""
    return [
        msgspec.structs.replace(msgspec.toml.decode(path.read_bytes(), type=Mutant), name=path.stem)
        for path in sorted(PLANTED.glob("*.toml"))
    ]
