"""The prompt service: prefills prompts, answers with the first token, holds KV blocks for their reader."""
