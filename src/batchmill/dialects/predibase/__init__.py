"""Predibase's API for its published package: datasets, batch inference, deployments and calls of deployments."""
