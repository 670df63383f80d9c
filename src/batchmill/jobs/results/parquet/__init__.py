"""Results as Parquet."""
