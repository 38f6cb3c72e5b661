"""The public face of Tandem: the OpenAI API in front of prompt and completion engines.

Text exists only here. A request's life: `endpoint` reads it, `openai_types` validates it, `preparation`
turns it into token ids and limits, `pairing` chooses its engines, `request_flow` joins the two legs of
`legs` into one stream of tokens, `text_stream` turns those into text, `openai_responses` frames it.
"""
