"""Rows of the table of other engines' options.

Names are those of vLLM, SGLang, llama.cpp (and llama-cpp-python), Ollama, TGI, MLX and
transformers, with underscores. An answer has names of ours in braces: `{name}`, `{!name}` for what
is turned off, `{name=value}`. Each door writes them in its own way.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

__all__ = ["DOORS", "SETTINGS", "Home", "Row"]


class Home(Enum):
    """Doors where the names of an answer are options, in words."""

    ENGINE = "Engine"
    SAMPLING = "SamplingParams"
    FORM = "StructuredOutput"
    CALL = "a call of the engine"
    SERVE = "`aioserve serve`"
    RUN = "`aioserve run`"
    LOAD = "`aioserve bench serve`"
    BENCH = "`aioserve bench throughput`"
    PLAN = "`aioserve plan`"
    ANY = ""
    """An answer without names, which is as good at every door."""

    @property
    def is_python(self) -> bool:
        """True if options there are arguments in Python, and not words of a command."""
        return self in (Home.ENGINE, Home.SAMPLING, Home.FORM, Home.CALL)


class Row(NamedTuple):
    """Names that mean the same elsewhere, and what is said of them."""

    home: Home
    names: str
    """Names with spaces between them. A name in several rows has the answer of the first whose
    options the door has, or else of the first."""
    answer: str


DOORS: Final[dict[Home, tuple[str, ...]]] = {
    Home.ENGINE: ("Engine",),
    Home.SAMPLING: ("SamplingParams",),
    Home.FORM: ("StructuredOutput",),
    Home.CALL: ("Engine.generate", "Engine.chat"),
}
"""Doors in Python, by their names in `aioserve`. Their signatures say which names are ours."""
SETTINGS: Final = (
    "host port uds tls_cert_file tls_key_file allow_without_key drain_seconds "
    "keep_alive_seconds api_key api_key_file served_model_names max_body_bytes max_prompts "
    "max_inputs max_n max_top_logprobs max_answer_bytes max_unsent_bytes max_stops max_tools "
    "max_schema_bytes operators open_paths allowed_hosts allowed_origins max_header_bytes "
    "max_headers body_timeout_seconds max_concurrent_calls stream_interval metrics metrics_names "
    "access_log page max_live_readers max_step_age_seconds max_items max_metadata "
    "max_metadata_key_chars max_metadata_value_chars max_stored_responses max_stored_bytes "
    "stored_response_seconds"
)
"""Settings of a server, with spaces between them. They come with an extra, which may be missing
here: a test compares them."""
