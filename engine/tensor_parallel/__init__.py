"""One model shared out to several ranks: processes that compute every step together.

Rank 0 is the engine process itself; it schedules, samples and hands over, and tells the others over ZMQ what
to compute. Each rank has its heads of every layer, its part of the hidden units and its slice of the KV pool.
"""
