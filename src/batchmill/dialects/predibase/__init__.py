"""Predibase's API: datasets, batch inference, deployments and their serving, as its published package speaks it."""
