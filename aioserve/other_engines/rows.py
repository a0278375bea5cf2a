"""Rows of the table of other engines' options.

Names are those of vLLM, SGLang, llama.cpp (and llama-cpp-python), Ollama, TGI, MLX and
transformers, with underscores. An answer writes our names in braces: `{name}`, `{!name}` for an
option turned off, `{name=value}`. Python and the command line spell them differently.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

__all__ = ["DOORS", "SETTINGS", "Home", "Row"]


class Home(Enum):
    """Place where the names in an answer are options; the value is its name in messages."""

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
    """An answer without names, which fits everywhere."""

    @property
    def is_python(self) -> bool:
        """True if options are Python arguments here, rather than flags of a command."""
        return self in (Home.ENGINE, Home.SAMPLING, Home.FORM, Home.CALL)


class Row(NamedTuple):
    """Names with the same meaning in other engines, and the answer to them."""

    home: Home
    names: str
    """Names, separated by spaces. A name may be in several rows: the first row whose options exist
    at the place asked about wins, or else the first row."""
    answer: str


DOORS: Final[dict[Home, tuple[str, ...]]] = {
    Home.ENGINE: ("Engine",),
    Home.SAMPLING: ("SamplingParams",),
    Home.FORM: ("StructuredOutput",),
    Home.CALL: ("Engine.generate", "Engine.chat"),
}
"""Classes and methods of `aioserve` whose signatures hold our names, by place."""
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
"""Settings of `aioserve serve`, separated by spaces. Listed here because the server is an optional
extra that may not be installed. A test compares this list with the real settings."""
