"""The one authority that TLS clients of the tests trust. It has signed nothing.

A client that reads those of the machine takes 27 ms of a processor to make, and tests make thousands.
"""

import os
from pathlib import Path

os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("tls") / "nobody.pem")
os.environ.pop("SSL_CERT_DIR", None)
