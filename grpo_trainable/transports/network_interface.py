"""The network interface through which other machines of the cluster reach this machine."""

from __future__ import annotations

import os
import socket
import struct
import sys

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo reads this variable when a group is created
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux, netdevice(7)


def let_gloo_use(address: str) -> None:
    """Make gloo listen on the address by which the cluster knows this machine.

    By default, gloo listens on the address that the host's name resolves to. On many machines, that
    address cannot be reached from other machines. If the environment already has a value for
    GLOO_SOCKET_IFNAME, that value is kept.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(GLOO_INTERFACE, name)


def interface_of(address: str) -> str | None:
    """Return the interface with this IPv4 address, or None if no interface has it.

    Also return None on systems other than Linux, because this function cannot look up addresses
    there.
    """
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(asked, name) == address), None)


def _address_of(asked: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None if it has none."""
    import fcntl

    request = struct.pack("256s", interface.encode())
    try:
        answer = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
