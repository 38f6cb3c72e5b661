"""`POST /v1/responses`: bodies, response objects and the events of a stream. Nothing is ever stored."""
