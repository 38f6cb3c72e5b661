"""The asyncio half of a service, shared by the prompt and the completion service. Never imports torch."""
