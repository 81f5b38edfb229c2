"""The network of production (`asyncrl.runtime.Network`): ZMQ's ROUTER and DEALER."""
