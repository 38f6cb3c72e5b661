"""The endpoints that generate, each as its body's parser and its answer's shape."""

from functools import partial

from proxy.answers import AnswerShape, ChunkStream, StreamedAnswer, WholeAnswer
from proxy.generation_api import AnswerContext, GenerationApi
from proxy.openai_responses import Kind, ResponseBuilder
from proxy.openai_types import ChatRequest, TextRequest, parse_chat, parse_text


def _answer(kind: Kind, request: ChatRequest | TextRequest, context: AnswerContext) -> AnswerShape:
    builder = ResponseBuilder(kind, context.request_id, request.model, context.created)
    with_logprobs = request.num_logprobs is not None
    if not request.stream:
        return WholeAnswer(context.client, builder, with_logprobs=with_logprobs, extras=context.extras)
    stream = ChunkStream(
        builder=builder,
        with_logprobs=with_logprobs,
        usage=context.usage if request.continuous_usage else None,
    )
    return StreamedAnswer(context.client, stream, include_usage=request.include_usage)


CHAT = GenerationApi(
    path="/v1/chat/completions",
    parse=parse_chat,
    answer=partial(_answer, "chat"),
)
TEXT = GenerationApi(
    path="/v1/completions",
    parse=parse_text,
    answer=partial(_answer, "text"),
)
APIS = (CHAT, TEXT)
