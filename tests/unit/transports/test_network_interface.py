"""The network interface that gloo uses."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from grpo_trainable.transports.network_interface import GLOO_INTERFACE, interface_of, let_gloo_use

LOOPBACK = "127.0.0.1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found only on Linux")


@linux
def test_an_interface_is_found_by_its_address():
    found = interface_of(LOOPBACK)
    assert found in [name for _, name in socket.if_nameindex()]


def test_an_address_of_no_interface_has_none():
    assert interface_of("192.0.2.1") is None  # reserved by RFC 5737, so nobody has it


@linux
def test_gloo_is_told_the_interface_unless_the_environment_says_another(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "theirs")
    let_gloo_use(LOOPBACK)
    assert os.environ[GLOO_INTERFACE] == "theirs"
    monkeypatch.delenv(GLOO_INTERFACE)
    let_gloo_use(LOOPBACK)
    assert os.environ[GLOO_INTERFACE] == interface_of(LOOPBACK)
