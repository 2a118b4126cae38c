"""Modules: finding and marking those of a model."""
