"""Weights that come from disk as needed: direct reads, a bounded cache of experts, a trunk in memory or not."""
