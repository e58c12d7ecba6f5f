"""Which network interface of this machine other machines of the cluster reach it by."""

from __future__ import annotations

import os
import socket
import struct
import sys

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # what gloo reads, when a group is made
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux, netdevice(7)


def let_gloo_use(address: str) -> None:
    """Has gloo listen where the cluster knows this machine. By itself it listens where the host's
    name leads, which on many machines is an address that no other machine reaches.

    What the environment says already is left alone.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(GLOO_INTERFACE, name)


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None where none has, or where it cannot be known:
    only Linux is asked."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(asked, name) == address), None)


def _address_of(asked: socket.socket, interface: str) -> str | None:
    """The IPv4 address of an interface; None where it has none."""
    import fcntl

    request = struct.pack("256s", interface.encode())
    try:
        answer = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
