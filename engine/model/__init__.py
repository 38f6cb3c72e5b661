"""Model code: what turns token ids and a KV pool into logits."""
