"""`POST /tokenize` and `POST /detokenize`, in the shape of vLLM's."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from proxy.body_parsing import Strict, parse_body
from proxy.chat_messages import Message
from proxy.errors import BadRequest, UnknownModel
from proxy.pairing import longest_model_len
from proxy.routes import Routes
from proxy.text_model import TextModel, TokenIds
from proxy.tools.choice import tool_use
from proxy.tools.definitions import ToolList
from wire.json_body import to_json

MAX_TOKENS = 1 << 20
"""Tokenized at most as long as no engine has told its limit."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(Strict):
    """Either a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    """Of a text: the tokenizer's own, as a completion's prompt gets them unless this is false."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "missing", "exactly one of prompt and messages is needed", {"field": "prompt"}
            )
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]


class TokenRoutes:
    def __init__(self, text: TextModel, model_names: frozenset[str], routes: Routes) -> None:
        self._text = text
        self._model_names = model_names
        self._routes = routes

    async def tokenize(self, body: bytes) -> bytes:
        """No engine is needed; `max_model_len` is null as long as none is known."""
        request = parse_body(TokenizeRequest, body)
        self._check_model(request.model)
        max_model_len = longest_model_len(self._routes.snapshot())
        token_ids = await self._token_ids(request, max_model_len or MAX_TOKENS)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": token_ids,
        }
        if request.return_token_strs:
            answer["token_strs"] = [self._text.tokenizer.id_to_token(token_id) for token_id in token_ids]
        return to_json(answer)

    async def detokenize(self, body: bytes) -> bytes:
        request = parse_body(DetokenizeRequest, body)
        self._check_model(request.model)
        for index, token_id in enumerate(request.tokens):
            if token_id >= self._text.vocab_size:
                raise BadRequest(
                    f"tokens[{index}]: {token_id} is outside the vocabulary of {self._text.vocab_size}",
                    param=f"tokens[{index}]",
                    code="invalid_value",
                )
        return to_json({"prompt": await self._text.text_of(request.tokens, skip_special_tokens=False)})

    async def _token_ids(self, request: TokenizeRequest, max_tokens: int) -> TokenIds:
        if request.messages is None:
            assert request.prompt is not None
            adds = request.add_special_tokens is not False
            return await self._text.text_prompt(request.prompt, max_tokens, add_special_tokens=adds)
        messages = [message.for_template() for message in request.messages]
        tools = tool_use(request.tools or [], None, True)
        return (await self._text.chat_prompt(messages, max_tokens, tools=tools)).token_ids

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self._model_names:
            raise UnknownModel(f"the model {model!r} does not exist", param="model")
