"""Questions about the installed standard library and the answers its docstrings give.

Everything here follows from the running CPython alone. The modules are a fixed list, the names are
sorted, and every random choice takes an explicit generator.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

MODULES = (
    *("argparse", "base64", "bisect", "builtins", "bz2", "collections", "contextlib", "copy"),
    *("csv", "dataclasses", "datetime", "decimal", "enum", "fnmatch", "fractions", "functools"),
    *("glob", "gzip", "hashlib", "heapq", "hmac", "html", "importlib", "io", "itertools"),
    *("json", "logging", "math", "os", "os.path", "pathlib", "pickle", "pprint", "queue"),
    *("random", "re", "secrets", "shlex", "shutil", "statistics", "string", "struct"),
    *("subprocess", "sys", "tarfile", "tempfile", "textwrap", "threading", "time", "timeit"),
    *("urllib.parse", "urllib.request", "uuid", "zipfile", "zlib"),
)
"""Modules that questions are about."""

CLASSES = (
    *("builtins.str", "builtins.list", "builtins.dict", "builtins.set", "builtins.tuple"),
    *("builtins.int", "builtins.float", "argparse.ArgumentParser", "asyncio.Queue"),
    *("collections.Counter", "collections.OrderedDict", "collections.deque"),
    *("contextlib.ExitStack", "datetime.datetime", "datetime.timedelta", "json.JSONEncoder"),
    *("logging.Logger", "pathlib.Path", "queue.Queue", "re.Match", "re.Pattern"),
    *("string.Template", "subprocess.Popen", "threading.Event", "threading.Thread"),
    "zipfile.ZipFile",
)
"""Classes whose methods questions are about too."""

MAX_CHARS = 110
CANONICAL = "What does {name} do?"
PHRASINGS = (
    "What does {name} do?",
    "What does {name}() do?",
    "what does {name} do",
    "What is {name} for?",
    "What is {name}?",
    "Explain {name}.",
    "Tell me about {name}.",
    "Describe {name}.",
    "{name}",
)
GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "hello", "hi there", "Hey", "Good morning")
GREETING_ANSWER = "Hello! Ask me what a function of the Python standard library does."
ABILITIES = (
    "Who are you?",
    "What can you do?",
    "Help",
    "help",
    "What are you?",
    "Can you help me?",
)
ABILITY_ANSWER = "I can say what a function of the Python standard library does and complete code."
THANKS = ("Thanks", "Thank you!", "thanks", "Thank you", "ok thanks")
THANKS_ANSWER = "You are welcome."
OTHER_QUESTIONS = (
    "How do I sort a list?",
    "How do I read a file?",
    "Write a function that adds two numbers.",
    "Write a poem.",
    "What is the weather like?",
    "What is the capital of France?",
    "How are you?",
    "Tell me a joke.",
    "What is 2 + 2?",
    "Who wrote Python?",
    "Why is the sky blue?",
    "Can you write code?",
)
UNKNOWN_ANSWER = "I do not know. I only know some names of the Python standard library."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful Python assistant.",
    "Answer briefly.",
    "You answer questions about Python.",
)

_SIGNATURE = re.compile(r"^[\w.]+\s*\(.*?\)(\s*(->|=)\s*[^\n]*)?$|^[\w.]+\(.*?\)\s*(->|--|:)\s*")
_SENTENCE = re.compile(r"^(.+?[.!?])(?=\s|$)")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|incl)\.$", re.IGNORECASE)
_NOISE = re.compile(r"<\||->| = |^>|^XXX|^An enumeration|^Deprecated|\[,")
_OBSCURE = re.compile(
    r"os\.(sched_|W[A-Z]|exec|spawn|posix_|tc|set|get\w*id|getp|getres|\w*xattr|pidfd|memfd|eventfd"
    r"|mk(nod|fifo)|maj|min|makedev|l?ch(own|mod|flags)|fd|fp|fch|fstat|ftr|p?readv?$|p?writev?$"
    r"|wait|lock|open?pty|login_tty|forkpty|init|copy_file|splice|sendf|statv|fstatv)"
)


@dataclass(frozen=True)
class Fact:
    """Dotted name and the first sentence of its docstring."""

    name: str
    answer: str


def first_sentence(doc: str | None) -> str | None:
    """Return the first sentence of ``doc`` on one line, or None if there is no usable one."""
    if not doc:
        return None
    lines = inspect.cleandoc(doc).split("\n")
    while lines and (not lines[0].strip() or _SIGNATURE.match(lines[0].strip())):
        stripped = _SIGNATURE.sub("", lines[0].strip()).strip()
        if stripped:
            lines[0] = stripped
            break
        lines.pop(0)
    blank = next((index for index, line in enumerate(lines) if not line.strip()), len(lines))
    paragraph = " ".join(" ".join(lines[:blank]).split())
    end = 0
    while match := _SENTENCE.match(paragraph[end:]):
        end += match.end()
        if not _ABBREVIATION.search(paragraph[:end]):
            break
    sentence = paragraph[:end] or paragraph
    usable = 12 <= len(sentence) <= MAX_CHARS and sentence.isascii() and " " in sentence
    if not usable or sentence[-1] in ":,-(=?" or _NOISE.search(sentence):
        return None
    return sentence


def _public(module_name: str) -> Iterator[tuple[str, object]]:
    """Yield the documented public callables of a module by name."""
    module = importlib.import_module(module_name)
    exported = getattr(module, "__all__", None)
    for name in sorted(set(exported or dir(module))):
        value = getattr(module, name, None)
        home = getattr(value, "__module__", None)
        if name.startswith("_") or not callable(value):
            continue
        if exported is not None or home in (module_name, "_" + module_name):
            yield name, value


def _own_doc(value: object) -> str | None:
    """Return the docstring that belongs to ``value`` itself, not to its type or a base."""
    if inspect.isclass(value):
        doc = value.__dict__.get("__doc__")
        if isinstance(doc, str) and doc.startswith(value.__name__ + "("):
            return doc if "\n" in doc else None
        return doc if isinstance(doc, str) else None
    return value.__doc__ if inspect.isroutine(value) else None


def collect_facts() -> list[Fact]:
    """Return every fact about the installed standard library, sorted by name."""
    found: dict[str, str] = {}

    def belongs(value: object) -> bool:
        """Say whether the library defines ``value``; other packages add methods to its classes."""
        home = getattr(value, "__module__", None) or "builtins"
        return str(home).partition(".")[0] in sys.stdlib_module_names

    def add(name: str, doc: str | None) -> None:
        sentence = first_sentence(doc)
        if sentence is not None and not _OBSCURE.match(name):
            found.setdefault(name.removeprefix("builtins."), sentence)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module_name in MODULES:
            add(module_name, importlib.import_module(module_name).__doc__)
            for name, value in _public(module_name):
                add(f"{module_name}.{name}", _own_doc(value))
        for path in CLASSES:
            module_name, _, class_name = path.rpartition(".")
            cls = getattr(importlib.import_module(module_name), class_name)
            for name in sorted(dir(cls)):
                value = getattr(cls, name, None)
                if not name.startswith("_") and callable(value) and belongs(value):
                    add(f"{path}.{name}", _own_doc(value))
    return [Fact(name, found[name]) for name in sorted(found)]


def sample_questions(
    facts: list[Fact], count: int = 300, seed: int = 2024
) -> list[tuple[str, str]]:
    """Return ``count`` (question, expected answer) pairs drawn with a fixed seed."""
    chosen = random.Random(seed).sample(facts, min(count, len(facts)))
    return [(CANONICAL.format(name=fact.name), fact.answer) for fact in chosen]
