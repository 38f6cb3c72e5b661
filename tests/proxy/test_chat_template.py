import pytest

from proxy.chat_template import ChatTemplate
from proxy.errors import BadRequest
from proxy.text_model import TextModel

USER = {"role": "user", "content": "Hi"}


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render([USER])


def test_the_embedded_models_template(smollm: TextModel) -> None:
    assert smollm.template is not None
    assert smollm.template.render([{"role": "system", "content": "Be brief."}, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.template.render([USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_take_their_line_with_them() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nA\n{% endif %}\n") == "A\n"


def test_special_tokens_and_messages_are_visible() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>Hi"


def test_the_templates_own_refusal_is_the_clients_error() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.error.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages + 1 }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_crash_the_proxy(source: str) -> None:
    with pytest.raises(BadRequest):
        render(source)


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_generation_blocks_and_loop_controls_are_understood() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source) == "user"


def test_the_date_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}").startswith("2")
