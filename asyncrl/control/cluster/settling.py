"""Node setup of a service's process before the service starts: private folders, and the right interface."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import replace
from urllib.parse import urlsplit

import psutil

from asyncrl.control.roster import INTERFACE_VARIABLES
from asyncrl.core.files.private import make_private
from asyncrl.core.service import ServiceContext

TEMPORARY = "tmp"
"""The folder of temporary files, in the run's private one."""


def settle(context: ServiceContext) -> ServiceContext:
    """Prepare this node, and this process, for the service.

    Libraries put sockets and files where temporary ones belong: that is a folder of the run's own, too.

    Returns:
        `context` with the address of this node as `launcher.host`: the gateway listens there.

    Raises:
        ConfigError: The folder for the sockets belongs to somebody else.
    """
    if context.sockets is not None:
        make_private(context.sockets)
        make_private(context.sockets / TEMPORARY)
        os.environ["TMPDIR"] = tempfile.tempdir = str(context.sockets / TEMPORARY)
    config = context.config
    if not config.launcher.is_cluster:
        return context
    home = urlsplit(context.addresses.get("buffer.0", "")).hostname
    if home is None:
        return context
    address = address_towards(home)
    if interface := interface_of(address):
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, interface))
    launcher = config.launcher.model_copy(update={"host": address})
    return replace(context, config=config.model_copy(update={"launcher": launcher}))


def address_towards(host: str) -> str:
    """Return the address of this machine as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str:
    """Return the name of this machine's interface with that address, empty if there is none."""
    found = (
        name for name, addresses in psutil.net_if_addrs().items() for one in addresses if one.address == host
    )
    return next(found, "")
