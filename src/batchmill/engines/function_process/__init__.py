"""The engine of deployed functions: user code in an environment and a process of its own, replaced when it dies.

`engine` is its face; `process` keeps the process alive and settles who is to blame; `live`, `trains` and `streams` are
what is asked of it.
"""
