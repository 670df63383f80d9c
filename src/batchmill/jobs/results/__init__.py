"""Results of a job: gathered, streamed, written as JSON lines, CSV or Parquet."""
