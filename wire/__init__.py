"""Types that cross a process boundary: what the proxy and the two services say to each other.

Nothing but msgspec is imported here, so that every other package may depend on it. The types are
frozen dataclasses: FastAPI validates them at the HTTP edges, msgspec encodes them between processes.
"""
