"""Every row of a dataset is checked while it is sealed, in parallel: ranges of bytes, in children or on nodes."""
