"""Inferless' API for calling apps. Source: inferless 0.2.15."""
