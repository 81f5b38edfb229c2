"""The network of production (`asyncrl.core.runtime.interface.Network`): ZMQ's ROUTER and DEALER."""
