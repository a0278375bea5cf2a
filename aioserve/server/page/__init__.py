"""Page at `/`: a playground and a live view of the engine, in plain files in this folder.

The files are read once. Their policy lets the page load and run only its own files. They hold no
secrets and need no key; the data that they request does.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["PAGE_PATHS", "page_routes"]

_HTML = "text/html; charset=utf-8"
_FILES = {
    "/": ("index.html", _HTML),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/server.js": ("server.js", "text/javascript; charset=utf-8"),
    "/page/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/page/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/page/gantt.js": ("gantt.js", "text/javascript; charset=utf-8"),
}
PAGE_PATHS: frozenset[str] = frozenset(_FILES)
"""Paths that a browser requests before it has a key."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page, one for each file."""
    folder = files(__name__)
    return [
        Route(path, _answering((folder / name).read_bytes(), kind), methods=["GET"])
        for path, (name, kind) in _FILES.items()
    ]


def _answering(content: bytes, kind: str):
    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer
