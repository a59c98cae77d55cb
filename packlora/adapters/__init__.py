"""Adapters on a Hugging Face model: what they are, the layer that runs them, attaching, files, merging."""
