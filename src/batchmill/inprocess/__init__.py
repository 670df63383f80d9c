"""Jobs in the process of a Python program: what `batchmill run` does, without a command and without a server."""
