"""Executes what the scheduler decides: step loop, model runner, KV pool, sampler, the engine process."""
