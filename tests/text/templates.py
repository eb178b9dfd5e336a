"""Chat templates in the styles models come with, and conversations to run through them."""

CHATML = """\
{%- if tools %}
    {{- '<|turn|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions, one JSON object a line:' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '</s>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|turn|>system\\n' + messages[0]['content'] + '</s>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|turn|>assistant' }}
        {%- if message.content %}
            {%- generation %}
            {{- '\\n' + message.content }}
            {%- endgeneration %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function %}
            {{- '\\n[call] {"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
        {{- '</s>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|turn|>user' }}
        {%- endif %}
        {{- '\\n[result] ' + message.content }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '</s>\\n' }}
        {%- endif %}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|turn|>' + message.role + '\\n' + message.content + '</s>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
    {%- if thinking is defined and thinking is false %}
        {{- '(no thoughts)\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "01 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "[system]\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You may call these; answer with JSON.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + eos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only calls one tool at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '[assistant]\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" + eos_token }}
    {%- elif message.role in ("tool", "ipython") %}
        {{- "[ipython]\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- eos_token }}
    {%- else %}
        {{- '[' + message['role'] + ']\\n\\n' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role not in ("user", "assistant") %}
        {%- continue %}
    {%- endif %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate:
            user, assistant, user, assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == "assistant" else message['role'] -%}
    {{ '<|turn|>' + role + '
' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '</s>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|turn|>model
' }}
{%- endif -%}
"""

DOCUMENTS = """\
{{ bos_token }}[system] Answer from the documents.
{% for document in documents %}
Document {{ loop.index }}
    {% for key, value in document | items %}
    {{ key }}: {{ value }}
    {% endfor %}

{% endfor %}
{% for message in messages %}
[{{ message.role }}] {{ message.content }}
{% if loop.index > 30 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}
"""

# Only lists of parts: what a string would do here is nothing at all.
PARTS_ONLY = """\
{% for message in messages %}{{ message.role }}:
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endfor %}"""

PLAIN = [{"role": "user", "content": "Where is the harbour?"}]
TURNS = [
    {"role": "system", "content": "Be brief. <b>&amp;</b>"},
    {"role": "user", "content": "  Où est la gare? 😀  "},
    {"role": "assistant", "content": "Behind you.\n"},
    {"role": "user", "content": "And 'the wall'?"},
]
TOOL_TURNS = [
    {"role": "user", "content": "Weather in 東京?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "東京", "days": [1, 2]}},
            }
        ],
    },
    {"role": "tool", "name": "weather", "content": '{"sky": "<clear> & \'calm\'"}'},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How's the weather in a city? <é>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
                "required": ["city"],
            },
        },
    }
]
PAPERS = [{"title": "Tides", "text": "Twice a day."}, {"title": "Boats", "text": "They <float>."}]
