"""Datasets that have names: uploads that were checked, for whoever runs jobs over them by name."""
