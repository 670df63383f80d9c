"""Workers of models: started, fed with shards, watched, shared between jobs."""
