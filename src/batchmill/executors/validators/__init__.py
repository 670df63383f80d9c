"""Classes of users that validate answers: the processes that run them, and how a worker uses these."""
