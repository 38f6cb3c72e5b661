"""Models that the transformers package computes: injected attention over the paged pool, engine-owned cache.

Importing any module of it imports transformers, which takes seconds: only for models that need it.
"""
