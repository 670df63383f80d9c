"""The program of a deployed function's process, for environments with nothing but Python 3.9.

It imports the standard library and itself, nothing else of batchmill; what it finds installed (msgspec, numpy, pandas,
pydantic) it uses. The worker on the other side of the socket is `engines.function`.
"""
