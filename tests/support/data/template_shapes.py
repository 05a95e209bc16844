"""Four shapes of template that models ship; GEN and END stand where generation marks may.

How they name roles, where they trim, what they add to the last turn, leave out of earlier ones or
refuse, and how each turn ends.
"""

# Every system turn tells the tools; results come back under a role of another name.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}
{%- else %}{% set system, turns = '', messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nKnowledge ends in 2023\n\n' }}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{- system + '<|eot_id|>' }}
{%- for m in turns %}
{%- set name = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + name + '<|end_header_id|>\n\n' }}
{%- if m.role == 'assistant' %}GEN
{%- if m.tool_calls %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}END
{%- else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
# An empty block of thoughts in the last turn alone; results are a turn of the user.
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set asked = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > asked.last and loop.last and not m.reasoning_content %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}GEN
{%- if loop.index0 > asked.last and m.reasoning_content %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}END
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# The system turn is put into the first question; roles must alternate; there are no tools.
GEMMA3 = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}
{%- set first, turns = messages[0].content + '\n\n', messages[1:] %}
{%- else %}{% set first, turns = '', messages %}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- if loop.first %}{{ first }}{% endif %}
{%- if m.role == 'assistant' %}GEN{{ m.content | trim }}END
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
# Channels; the last answer ends in another token, and thoughts before an answer are left out.
GPT_OSS = """\
{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}{{ '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ 'type ' + tool.function.name + ' = any;' }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- set called = namespace(name='') %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if not called.name %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content + '<|end|>' }}{% set called.name = '' %}
{%- elif m.role == 'assistant' %}
{%- set later = namespace(answer=false) %}
{%- for n in messages[loop.index:] %}
{%- if n.role == 'assistant' and not n.tool_calls %}{% set later.answer = true %}{% endif %}
{%- endfor %}
{{- '<|start|>assistant' }}GEN
{%- if m.tool_calls %}
{%- if m.thinking and not later.answer %}
{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}
{%- set called.name = m.tool_calls[0].function.name %}
{{- ' to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
{%- else %}
{%- if m.thinking and loop.last %}
{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}
{{- '<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}{% endif %}END
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
SHAPES = {"llama3": LLAMA3, "qwen3": QWEN3, "gemma3": GEMMA3, "gpt-oss": GPT_OSS}
SPECIAL_TOKENS = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
]
PLAIN_TOKENS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
