"""Measures aioserve on a GPU, the limits of the card, and other engines on it.

Models have random weights, made on the spot, and requests random tokens, so nothing is downloaded.
These are the parts, the most important first, each of which `--only` can select:

    card          how fast it reads memory and multiplies matrices: the floor of what comes
    offline       256 requests at once, prompts and answers of 100 to 1,024 tokens, Qwen3-0.6B
    single        one request, decoded with graphs
    prefill       a prompt of 4,096 tokens
    prefix        64 prompts with 2,048 tokens in common, and as long ones with none
    single-eager  one request, decoded without graphs
    transformers, vllm, sglang
                  offline and single on other engines; one that isn't installed is named missing
    online        requests at random times (Poisson), at 50 % and 80 % of what offline has reached
    8b-single, 8b-offline
                  the same with Qwen3-8B's shape, offline with 64 requests

Printed are tokens a second, time to first token and per output token, and the host's time for a
step. The idle time of the device between steps is by its own clock (`--device cpu` has only the
event loop's). Also printed are the delays of a ticker of 1 ms in the same event loop. The last
figure is the share of the time that the steps need at least: their bytes and operations, at the
limits of `card`.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --json gpu.json --minutes 8 --only card offline transformers
    python benchmarks/gpu.py --json cpu.json --device cpu --shape tiny     to try the benchmark

Parts run in processes of their own, so a part that dies leaves the others. The file is written
after each of them. When the minutes are over, the remaining parts are cut off, and the output says
so. The exit status is 1 if a part failed, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_report import lines_of, summary

ORDER = (
    "card",
    "offline",
    "single",
    "prefill",
    "prefix",
    "single-eager",
    "transformers",
    "vllm",
    "sglang",
    "online",
    "8b-single",
    "8b-offline",
)
ALONE = ("transformers", "vllm", "sglang")
"""Parts that have processes to themselves."""
POLL_SECONDS = 0.1
LOG_CHARS = 2000
"""Characters of the last output of a process that died."""


class Report:
    """Results of each part, in a file that is always complete."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self._options = vars(options)
        self._path = Path(options.json)
        self._write()

    def add(self, name: str, entry: dict[str, Any]) -> None:
        self.parts[name] = entry
        self._write()
        print("\n".join(lines_of(name, entry)), flush=True)

    def warn(self, name: str, what: str) -> None:
        """Add a warning to a part that has ended well."""
        self.parts[name]["warning"] = what
        self._write()
        print(f"{name}: {what}", flush=True)

    @property
    def results(self) -> dict[str, Any]:
        return {name: e["result"] for name, e in self.parts.items() if e["status"] == "ok"}

    @property
    def is_ok(self) -> bool:
        return all(entry["status"] != "failed" for entry in self.parts.values())

    def _write(self) -> None:
        written = {"options": self._options, "ok": self.is_ok, "parts": self.parts}
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        beside.replace(self._path)


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report(options)
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="aioserve-gpu-") as folder:
        left = [name for name in ORDER if name in options.only]
        while left and time.monotonic() < deadline:
            if left[0] in ALONE and importlib.util.find_spec(left[0]) is None:
                report.add(left[0], {"status": "missing", "error": "it is not installed"})
            else:
                run_process(next_group(left), report, Path(folder), deadline, options)
            left = [name for name in left if name not in report.parts]
    for name in left:
        report.add(name, {"status": "cut off", "error": f"{options.minutes:g} minutes were over"})
    print("\n".join(summary(report.results)))
    sys.exit(0 if report.is_ok else 1)


def next_group(left: list[str]) -> list[str]:
    """Return the parts for one process: all up to the next that needs one for itself."""
    if left[0] in ALONE:
        return left[:1]
    end = next((i for i, name in enumerate(left) if name in ALONE), len(left))
    return left[:end]


def run_process(
    names: list[str], report: Report, folder: Path, deadline: float, options: argparse.Namespace
) -> None:
    """Run parts until they are done, one has failed, or one takes too long."""
    lines, log = folder / "report.jsonl", folder / "log.txt"
    lines.write_text("")
    settings = {
        "parts": names,
        "report": str(lines),
        "results": report.results,
        "folder": str(folder),
        "device": options.device,
        "dtype": options.dtype,
        "scale": options.shape,
        "repeats": options.repeats,
        "rate": options.rate,
        "engine_options": options.engine_options,
    }
    command = [sys.executable, Path(__file__).with_name("gpu_parts.py"), json.dumps(settings)]
    with log.open("wb") as output:
        # In a group of its own, as engines start processes.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            follow(process, names, report, lines, deadline, 60 * options.part_minutes)
            ended = process.poll()
        finally:
            kill(process)
    said = log.read_text(encoding="utf-8", errors="replace")
    if options.verbose:
        print(said, file=sys.stderr)
    if ended is None:
        return
    running = next((name for name in names if name not in report.parts), None)
    error = f"its process ended with {ended}: {said[-LOG_CHARS:]}"
    if running is None:
        if ended != 0:
            report.warn(names[-1], error)
    elif ended != 0 or names[0] not in report.parts:
        report.add(running, {"status": "failed", "error": error})


def follow(
    process: subprocess.Popen[bytes],
    names: list[str],
    report: Report,
    lines: Path,
    deadline: float,
    part_seconds: float,
) -> None:
    """Report parts as they end, until the process does, or something takes too long."""
    began, done = time.monotonic(), 0
    while True:
        ended = process.poll() is not None
        for line in lines.read_text(encoding="utf-8").splitlines(keepends=True)[done:]:
            if not line.endswith("\n"):
                break
            entry = json.loads(line)
            report.add(entry.pop("part"), entry)
            began, done = time.monotonic(), done + 1
        now = time.monotonic()
        if ended or now > deadline:
            return
        if now > began + part_seconds:
            if done < len(names):
                error = f"it took longer than {part_seconds:g} seconds"
                report.add(names[done], {"status": "failed", "error": error})
            else:
                report.warn(names[-1], f"its process didn't end in {part_seconds:g} seconds")
            return
        time.sleep(POLL_SECONDS)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", required=True, help="what is written")
    parser.add_argument("--minutes", type=float, default=30.0, help="when parts are cut off")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER, metavar="NAME")
    parser.add_argument("--part-minutes", type=float, default=5.0, help="of one part at most")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument("--shape", choices=["0.6b", "tiny"], default="0.6b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2, help="of each run; the best counts")
    parser.add_argument("--rate", type=float, help="requests a second of the online run")
    parser.add_argument(
        "--engine-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help='of aioserve, such as {"max_num_batched_tokens": 8192}',
    )
    parser.add_argument("--verbose", action="store_true", help="print what the processes print")
    options = parser.parse_args()
    if options.rate is not None and options.rate <= 0:
        parser.error(f"--rate must be more than 0, got {options.rate:g}")
    for name in ("minutes", "part_minutes", "repeats"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    return options


if __name__ == "__main__":
    main()
