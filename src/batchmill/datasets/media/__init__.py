"""Media that cells of a table name: found and checked while sealing, read when a request is made."""
