"""Modelbit's inference API: deployed functions called with lists of arguments."""
