"""The two addresses of every model: as it stands, and a version of it."""

MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"
MODEL_PATHS = (("", MODEL), ("Version", VERSION))  # what an operation's name ends with, and where it is
