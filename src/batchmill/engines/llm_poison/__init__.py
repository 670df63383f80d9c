"""Requests that an engine server dies of: found, tried alone, refused, and kept from stopping other projects."""
