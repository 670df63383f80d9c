"""The changes of the database's schema, one module each version: Alembic revisions."""
