"""Objects in S3, Google Cloud Storage, Azure or a folder, through obstore, which is imported by `store` alone."""
