"""Request and reply between services, over a network of the process's runtime.

A call is one msgpack header (`id`, `op`, arguments) and any number of raw frames; so is its reply.
Every wait has a deadline. With keys (`asyncrl.core.sockets.keys`) a connection is encrypted, and only
holders of an allowed key get one.
"""

from asyncrl.core.rpc.client import AsyncClient, Client, PendingCall
from asyncrl.core.rpc.message import Reply
from asyncrl.core.rpc.request import Handler, Request
from asyncrl.core.rpc.server import Server
from asyncrl.core.runtime.limits import Limits

__all__ = ["AsyncClient", "Client", "Handler", "Limits", "PendingCall", "Reply", "Request", "Server"]
