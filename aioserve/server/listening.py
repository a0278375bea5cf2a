"""Sockets that a server listens on: an address or a Unix socket, plain or with TLS.

Knows sockets, and nothing of what is served.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from aioserve.arguments import check_fields, integer, name, number, optional, rules_of, text
from aioserve.errors import ConfigError

__all__ = ["Listening", "bound", "check_reach", "check_tls", "url_of"]

MAX_SECONDS = 7 * 24 * 3600.0


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Address, TLS and timeouts of a server. Raises `ConfigError` for a value outside its range."""

    host: Annotated[str, name] = "127.0.0.1"
    """Name or address to listen at. If other machines can reach it, a key is needed. A name is also
    one of `allowed_hosts`."""
    port: Annotated[int, integer(0, 65535)] = 8000
    """Port to listen at. 0 takes a free one, which is printed."""
    uds: Annotated[str | None, optional(text(1, 107))] = None
    """Path of a Unix socket to listen at, in place of host and port."""
    tls_cert_file: Annotated[str | None, optional(text(1, 4096))] = None
    """PEM file with the certificate and its chain of signers. The server then speaks HTTPS."""
    tls_key_file: Annotated[str | None, optional(text(1, 4096))] = None
    """PEM file with the certificate's key, if it is in another file."""
    allow_without_key: bool = False
    """Serve without any key a host that other machines can reach."""
    drain_seconds: Annotated[float, number(0, MAX_SECONDS)] = 30.0
    """Seconds that answers in progress may continue after SIGTERM or Ctrl-C."""
    keep_alive_seconds: Annotated[float, number(0, MAX_SECONDS, above=True)] = 75.0
    """Seconds that a connection without a request stays open. Choose more than the proxy in front
    of the server has."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the server, besides its addresses."""
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return (self.host,)
        return ()

    def __post_init__(self) -> None:
        check_fields(ConfigError, self, _RULES)
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError(
                "tls_key_file has no effect without tls_cert_file",
                argument="tls_key_file",
                value=self.tls_key_file,
            )
        if self.uds is not None:
            for option, default in (("host", "127.0.0.1"), ("port", 8000)):
                if (value := getattr(self, option)) != default:
                    raise ConfigError(
                        f"{option} has no effect with uds={self.uds!r}: leave one of them out",
                        argument=option,
                        value=value,
                    )


_RULES = rules_of(Listening)


def check_reach(listening: Listening, *, has_keys: bool) -> None:
    """Raise `ConfigError` if other machines could call a server without a key. A Unix socket is
    guarded by the permissions of its directory."""
    if has_keys or listening.allow_without_key or listening.uds is not None:
        return
    for _, address in _addresses(listening):
        # A link-local address has its interface after a percent sign.
        if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
            raise ConfigError(
                f"host {listening.host} can be reached from other machines, and there is no key: "
                "set one (--api-key-file FILE), or allow it (--allow-without-key)",
                argument="host",
                value=listening.host,
            )


def check_tls(listening: Listening) -> None:
    """Raise `ConfigError` if the files hold no certificate and its key."""
    if listening.tls_cert_file is None:
        return
    for option in ("tls_cert_file", "tls_key_file"):
        file = getattr(listening, option)
        try:
            if file is not None:
                Path(file).open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"{option}: {file} can't be read: {error.strerror}", argument=option, value=file
            ) from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A key with a password would ask for it on the terminal.
        context.load_cert_chain(
            listening.tls_cert_file, listening.tls_key_file, password=lambda: b""
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert_file: {listening.tls_cert_file} and its key can't be used: {error}",
            argument="tls_cert_file",
            value=listening.tls_cert_file,
        ) from error


@contextmanager
def bound(listening: Listening) -> Iterator[list[socket.socket]]:
    """Sockets bound to the address, and closed at the end of the block. They don't listen yet, so
    that an address in use shows before a model loads. Raises `ConfigError` with the reason."""
    sockets: list[socket.socket] = []
    try:
        if listening.uds is not None:
            sockets.append(_unix_socket(listening.uds))
        else:
            _take(listening, sockets)
        yield sockets
    finally:
        for one in sockets:
            one.close()
        if listening.uds is not None and sockets:
            with suppress(OSError):
                os.unlink(listening.uds)


def url_of(listening: Listening, sockets: list[socket.socket]) -> str:
    """URL of the server, without a slash at its end."""
    scheme = "http" if listening.tls_cert_file is None else "https"
    if listening.uds is not None:
        return f"{scheme}://localhost"
    host = listening.host
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:  # valid to listen at, but not to call
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = f"[{address}]" if address.version == 6 else str(address)
    return f"{scheme}://{host}:{sockets[0].getsockname()[1]}"


def _addresses(listening: Listening) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(
            listening.host, listening.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {listening.host!r} has no address: {getattr(error, 'strerror', error)}",
            argument="host",
            value=listening.host,
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _take(listening: Listening, sockets: list[socket.socket]) -> None:
    """Bind all addresses of a name, at one port."""
    port, refused = listening.port, None
    for family, address in _addresses(listening):
        try:
            one = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a kernel without IPv6
            refused = error
            continue
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
        except OSError as error:
            one.close()
            refused = error
            if error.errno != errno.EADDRNOTAVAIL:
                raise _not_taken(listening, port, error) from error
            continue
        one.setblocking(False)
        sockets.append(one)
        port = one.getsockname()[1]
    if not sockets and refused is not None:
        raise _not_taken(listening, port, refused) from refused


def _not_taken(listening: Listening, port: int, error: OSError) -> ConfigError:
    argument, why = "host", error.strerror
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        argument = "port"
    if error.errno == errno.EADDRINUSE:
        why = "it is in use; --port chooses another, and --port 0 a free one"
    return ConfigError(
        f"port {port} of {listening.host} can't be listened at: {why}",
        argument=argument,
        value=getattr(listening, argument),
    )


def _unix_socket(path: str) -> socket.socket:
    def refused(why: str | None) -> ConfigError:
        return ConfigError(f"uds {path} can't be listened at: {why}", argument="uds", value=path)

    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            if _answers(path):
                raise refused("it is in use")
            os.unlink(path)  # left behind by a server that was killed
        else:
            raise refused("there is a file of another kind")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise refused(error.strerror) from error
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.bind(path)
    except OSError as error:
        one.close()
        raise refused(error.strerror) from error
    one.setblocking(False)
    return one


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it has a queue, which is full
    return True
