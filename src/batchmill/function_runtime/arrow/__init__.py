"""Arrow batches of rows, and what of them is JSON. They need pyarrow."""
