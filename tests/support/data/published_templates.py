"""Chat templates of model families, cut down to the parts that decide about turns.

Hashes of their tokens are stored. Templates with tools and thoughts are in `chat_templates`.
"""

# ruff: noqa: RUF001  # DeepSeek's tokens are written with a fullwidth bar

from dataclasses import dataclass, field
from typing import Any

from support.data.chat_templates import template


@dataclass(frozen=True)
class Family:
    """One family: its template, its special tokens, and the token that ends an answer.

    Attributes:
        added: Tokens of the vocabulary that no flag calls special.
    """

    template: str
    stop: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


CHATML, LLAMA3, GEMMA, PHI3 = map(template, ("chatml", "llama-3", "gemma", "phi-3"))

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}\
{% endif %}{% endfor %}"""

MISTRAL_V1 = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}\
{% endif %}{% endfor %}"""

MISTRAL_V2 = MISTRAL_V1.replace(
    "{{ message['content'] + eos_token + ' ' }}", "{{ ' ' + message['content'] + eos_token}}"
)

MISTRAL_V3 = """\
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {{- {'name': call.name, 'arguments': call.arguments} | tojson }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

QWEN25 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) \
or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" \
and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n')\
.split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') \
+ '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = """\
{{ bos_token + 'A chat between a curious user and an artificial intelligence assistant.' }}\
{% for message in messages %}\
{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}\
{% elif message['role'] == 'assistant' %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""

DEEPSEEK_V3 = """\
{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}\
{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' %}\
{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}\
{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}"""

DEEPSEEK_R1 = """\
{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}\
{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}\
{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""

HARMONY = """\
{{- "<|start|>system<|message|>You are ChatGPT.<|end|>" }}
{%- set loop_messages = messages %}
{%- if messages[0].role == "system" %}
    {{- "<|start|>developer<|message|># Instructions\n\n" + messages[0].content + "<|end|>" }}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
                {{- message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant" }}
{%- endif %}"""

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SP = ("<unk>", "<s>", "</s>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_THINK = ("<think>", "</think>")

FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", _IM),
    "llama-2": Family(LLAMA2, "</s>", _SP, bos="<s>", eos="</s>"),
    "llama-3": Family(
        LLAMA3,
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral-v1": Family(MISTRAL_V1, "</s>", _SP, bos="<s>", eos="</s>"),
    "mistral-v2": Family(MISTRAL_V2, "</s>", _SP, bos="<s>", eos="</s>"),
    "mistral-v3": Family(
        MISTRAL_V3,
        "</s>",
        (*_SP, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        bos="<s>",
        eos="</s>",
    ),
    "gemma": Family(
        GEMMA,
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
    ),
    "qwen2.5": Family(QWEN25, "<|im_end|>", _IM, ("<tool_call>", "</tool_call>")),
    "qwen3": Family(QWEN3, "<|im_end|>", _IM, _THINK),
    "qwen3 without thinking": Family(
        QWEN3, "<|im_end|>", _IM, _THINK, arguments={"enable_thinking": False}
    ),
    "phi-3": Family(
        PHI3,
        "<|end|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        eos="<|endoftext|>",
    ),
    "zephyr": Family(ZEPHYR, "</s>", _SP, bos="<s>", eos="</s>"),
    "vicuna": Family(VICUNA, "</s>", _SP, bos="<s>", eos="</s>"),
    "deepseek": Family(
        DEEPSEEK_V3,
        _DEEPSEEK[1],
        _DEEPSEEK,
        ("<｜User｜>", "<｜Assistant｜>"),
        bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1],
    ),
    "deepseek-r1": Family(
        DEEPSEEK_R1,
        _DEEPSEEK[1],
        _DEEPSEEK,
        ("<｜User｜>", "<｜Assistant｜>", *_THINK),
        bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1],
    ),
    "harmony": Family(HARMONY, "<|return|>", _HARMONY),
}
