"""Calls between workers over sockets."""
