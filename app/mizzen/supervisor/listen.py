"""Binds a listening socket, or says in one line which setting to change."""

import errno
import socket

from mizzen.errors import ConfigError


def listen(host: str, port: int, *, host_setting: str, port_setting: str) -> socket.socket:
    """A TCP socket that listens on ``host``:``port``. Raises ConfigError naming the setting."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:  # gaierror
        raise ConfigError(
            f"{host_setting} is {host!r}, which is no address of this host", setting=host_setting
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            message = f"{host_setting} is {host!r}, which is no address of this host"
            raise ConfigError(message, setting=host_setting) from error
        why = (
            "is taken: another process listens there" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
        )
        raise ConfigError(f"{port_setting}: {host}:{port} {why}", setting=port_setting) from error
    return listener
