"""Chat templates as real families write them, shortened to what matters to the pipeline."""

from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from runtime.worker.input.template import Template
from runtime.worker.output.families import call_form
from runtime.worker.output.upstream import dialect_of
from tests.tiny_models import CHAT_TEMPLATE, write_tokenizer

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nReturn <tool_call> objects.<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and \
not(message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')\
.split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + \
reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""The system text before the tools; old thinking dropped; results grouped into one user turn."""

ALTERNATING = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""No system role, and nothing but user and assistant in turns."""

ROLE_ENDS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<think>' + (message.reasoning_content or '') + '</think>' + message.content }}
        {%- for one in message.tool_calls or [] %}
            {{- '<tool_call>' + one.function.name }}
            {%- for key, value in one.function.arguments.items() %}
                {{- '\\n' + key + '=' + (value | string) }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_end|>\\n' + message.content }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<think>{% endif %}"""
"""A turn has no end of its own: the next role's marker ends it."""

EFFORT = """\
{{- '<|im_start|>system\\nReasoning: ' + (reasoning_effort or 'medium') + '<|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

GEMMA = """\
{%- if messages[0].role == 'system' %}
    {%- set first_user_prefix = messages[0].content + '\n\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set first_user_prefix = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- (first_user_prefix if loop.first else '') + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""
"""The system text in the first user's turn, and nothing but user and model in turns."""

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Any role as it is called, and of a turn nothing but its text."""

NO_CALLS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Shows tools and results, and loses the calls."""

PARTS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'image' %}<image>\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Loops over parts, as LLaVA, SmolVLM and Idefics3 do: a string has none that it shows."""

USER_PARTS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'user' %}{% for part in message.content %}{{ part['text'] }}{% endfor %}\
{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Wants a user's words as parts, and those of all others as strings."""

STRINGS = """\
{% for message in messages %}{% if message.content is not string %}\
{{ raise_exception('Content must be a string') }}{% endif %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Refuses parts."""

SILENT_CALLS = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>tool
{{ message.content | tojson }}<|im_end|>
{% elif message.tool_calls %}<|im_start|>assistant
{% for one in message.tool_calls %}<tool_call>
{{ one.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% elif message.content %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Has no text beside calls, quotes results as JSON, and drops empty messages."""

KNOWN_ROLES = """\
{% for message in messages %}{% if message.role in ('user', 'assistant') %}\
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Drops messages of all roles but two without a word."""

STRICT_CALLS = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'assistant' and loop.index0 and loop.previtem.role == 'assistant' %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{%- if message.tool_calls %}<|im_start|>assistant
{% for one in message.tool_calls %}<tool_call>
{{ one.function | tojson }}
</tool_call>{# tool_call.name #}{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Has no text beside calls, and refuses it before them."""

NINE_LETTERS = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in rest if message.role != 'tool' and not message.tool_calls %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- for one in message.tool_calls or [] %}
        {%- if one.id | length != 9 %}{{ raise_exception('Ids have 9 letters') }}{% endif %}
    {%- endfor %}
    {%- if message.role == 'tool' and message.tool_call_id | length != 9 %}
        {{- raise_exception('Ids have 9 letters') }}
    {%- endif %}
    {%- if message.role == 'assistant' and not message.content and not message.tool_calls %}
        {{- raise_exception('An answer must have content or calls') }}
    {%- endif %}
{%- endfor %}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% for one in message.tool_calls %}<tool_call>
{{ one.function | tojson }} {{ one.id }}
</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Ids of nine letters, turns that alternate but for calls and results, and no empty answer."""

ONE_CALL = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{- raise_exception('One call at a time') }}{% endif %}<tool_call>
{{ message.tool_calls[0].function | tojson }}
</tool_call>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

FIRST_CALL = ONE_CALL.replace("message.tool_calls | length != 1", "false")
"""Shows the first of several calls."""

TEXT_ARGUMENTS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{%- for one in message.tool_calls %}
{%- if loop.first %}{{ message.content + '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + one.function.name + '<｜tool▁sep｜>' + one.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Takes the arguments of calls as a text only."""

CALLS_ONLY = TEXT_ARGUMENTS[TEXT_ARGUMENTS.index("{%- for message") :]
"""Shows calls and results, and no tools, as DeepSeek's own does."""

PRINTED_ARGUMENTS = TEXT_ARGUMENTS.replace(
    "one.function.name + '<｜tool▁sep｜>' + one.function.arguments",
    "one.function.name ~ '<｜tool▁sep｜>' ~ one.function.arguments",
)
"""Writes arguments that are an object as Python does."""

FIRST_USER = """\
{% for message in messages %}{% if loop.first or message.role != 'user' %}<|im_start|>\
{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Broken: shows a user's words only where they begin the conversation."""

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "qwen3": QWEN3,
    "alternating": ALTERNATING,
    "role_ends": ROLE_ENDS,
    "effort": EFFORT,
    "gemma": GEMMA,
    "smollm2": SMOLLM2,
    "no_calls": NO_CALLS,
    "parts": PARTS,
    "user_parts": USER_PARTS,
    "strings": STRINGS,
    "silent_calls": SILENT_CALLS,
    "strict_calls": STRICT_CALLS,
    "known_roles": KNOWN_ROLES,
    "nine_letters": NINE_LETTERS,
    "one_call": ONE_CALL,
    "first_call": FIRST_CALL,
    "text_arguments": TEXT_ARGUMENTS,
    "calls_only": CALLS_ONLY,
    "printed_arguments": PRINTED_ARGUMENTS,
}


def template_of(directory: Path, name: str, *, tools_first: bool = True) -> Template:
    """The tiny models' tokenizer with another template."""
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATES[name])
    tokenizer: Any = load_tokenizer(directory)
    own_calls = call_form(dialect_of(tokenizer).name)
    return Template(tokenizer, tools_first=tools_first, own_calls=own_calls)
