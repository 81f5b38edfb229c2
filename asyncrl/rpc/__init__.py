"""Request and reply between services, over a network of the process's runtime.

A call is one msgpack header (`id`, `op`, arguments) and any number of raw frames; so is its reply.
Every wait has a deadline. With keys (`asyncrl.keys`) a connection is encrypted, and only holders of
an allowed key get one.
"""

from asyncrl.limits import Limits
from asyncrl.message import Reply
from asyncrl.rpc.client import AsyncClient, Client, PendingCall
from asyncrl.rpc.request import Handler, Request
from asyncrl.rpc.server import Server

__all__ = ["AsyncClient", "Client", "Handler", "Limits", "PendingCall", "Reply", "Request", "Server"]
