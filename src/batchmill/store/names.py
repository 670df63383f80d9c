"""Names of files of a data directory that are needed before its database is opened."""

DATABASE = "batchmill.db"
