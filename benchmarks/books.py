"""Claims of the three books that aioserve follows, each measured or answered here: a row for each.

    python benchmarks/books.py memory-formula chunk-cost
    python benchmarks/books.py --all
    python benchmarks/books.py --list

A row has the claim, the condition that the book names, our figures, the verdict and why. Most
figures are counted or simulated, and the same on every machine. `--list` says which vary. A clock
or the rounding of a processor decides those.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import book_arithmetic
import book_engines
import book_schedules
from book_claims import Claim, row

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for module in (book_arithmetic, book_schedules, book_engines)
    for claim in module.CLAIMS
}
HEAD = (
    "| name | book | claim | condition | here | verdict | why |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM")
    parser.add_argument("--all", action="store_true", help="every claim")
    parser.add_argument("--list", action="store_true", help="names of claims, measuring none")
    options = parser.parse_args(words)
    if unknown := [name for name in options.claims if name not in CLAIMS]:
        parser.error(f"no claim {', '.join(unknown)}; there are: {', '.join(CLAIMS)}")
    if options.list:
        for claim in CLAIMS.values():
            print(f"{claim.name:20} {'varies' if claim.varies else 'fixed '}  {claim.claim}")
        return
    chosen = list(CLAIMS) if options.all else options.claims
    if not chosen:
        parser.error("name a claim, or give --all or --list")
    print(HEAD)
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        print(row(CLAIMS[name], CLAIMS[name].measure()), flush=True)


if __name__ == "__main__":
    main()
