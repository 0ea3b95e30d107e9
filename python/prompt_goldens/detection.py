"""Templates for vLLM's detection of the content format: strings or lists of parts."""

TEMPLATES = [
    "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "{% for message in messages %}{{ message.content | trim }}{% endfor %}",
    (
        "{% for message in messages %}{% for c in message['content'] %}{{ c.text }}{% endfor %}"
        "{% endfor %}"
    ),
    (
        "{% for message in messages %}{% for c in message.content %}{{ c.text }}{% endfor %}"
        "{% endfor %}"
    ),
    (
        "{% for m in messages %}"
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c.text }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% for m in messages[1:] %}{% for c in m['content'][1:] %}{{ c.text }}{% endfor %}"
        "{% endfor %}"
    ),
    (
        "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% set a = messages %}{% set b = a | list %}{% for m in b[::-1] %}"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set messages = messages[1:] %}{% for m in messages %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% set text = m.content %}{% for c in text %}{{ c }}{% endfor %}"
        "{% endfor %}"
    ),
    "{% for c in content %}{{ c }}{% endfor %}",
    "{% for c in other %}{{ c }}{% endfor %}",
    (
        "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    ),
    (
        "{% macro show(parts) %}{% for c in parts %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    ),
    (
        "{% macro show(a, parts) %}{% for c in parts %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, m['content']) }}{% endfor %}"
    ),
    (
        "{% macro show(a, parts) %}{% for c in parts %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m['content'], 1) }}{% endfor %}"
    ),
    (
        "{% macro show(a, parts) %}{% for c in parts %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, parts=m['content']) }}{% endfor %}"
    ),
    (
        "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{{ show(messages[0].content) }}"
    ),
    (
        "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{% set x = show(m.content) | trim %}{{ 'a' + x }}{% endfor %}"
    ),
    (
        "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{% if show(m.content).startswith('x') %}{% endif %}{% endfor %}"
    ),
    (
        "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{% call show(m.content) %}{% endcall %}{% endfor %}"
    ),
    (
        "{% macro other(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    (
        "{% macro show(m) %}{% for c in m.content %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}"
    ),
    (
        "{% set ns = namespace(rest=[]) %}{% set ns.rest = messages[1:] %}{% for m in messages %}"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(rest=[]) %}{% set ns.rest = messages[1:] %}{% for m in ns.rest %}"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(a=1, rest=messages | list) %}{% for m in ns.rest[1:] %}"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(rest=messages) %}{% for m in ns.other %}{% for c in m.content %}"
        "{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(rest=messages) %}{% for m in ns['rest'] %}{% for c in m.content %}"
        "{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(messages) %}{% for m in ns %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(rest=messages) %}{% set x = ns.rest %}{% for m in x %}"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(rest=messages) | list %}{% for m in ns.rest %}"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    (
        "{% set d = dict(rest=messages) %}{% for m in d.rest %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% set a, b = messages %}{% for m in messages %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    (
        "{% set a, b = messages %}{% for m in a %}{% for c in m.content %}{{ c }}{% endfor %}"
        "{% endfor %}"
    ),
    "{% for i, m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for a, b in m.content %}{{ a }}{% endfor %}{% endfor %}",
    (
        "{% for m in messages %}{% for a, b in m.content %}{{ a }}{% endfor %}"
        "{% for c in m.content %}{% endfor %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% if m.content is not string %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endif %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% if a %}{% elif b %}{% else %}{% for c in m.content %}{{ c }}"
        "{% endfor %}{% endif %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% set x %}{% for c in m.content %}{{ c }}{% endfor %}{% endset %}"
        "{{ x }}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% filter trim %}{% for c in m.content %}{{ c }}{% endfor %}"
        "{% endfilter %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% generation %}{% for c in m.content %}{{ c }}{% endfor %}"
        "{% endgeneration %}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% with x = m.content %}{% for c in x %}{{ c }}{% endfor %}"
        "{% endwith %}{% endfor %}"
    ),
    "{% for m in messages %}{{ m.content | map(attribute='text') | join }}{% endfor %}",
    "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
    (
        "{% for m in messages if m.role == 'user' %}{% for c in m.content if c.text %}{{ c }}"
        "{% endfor %}{% endfor %}"
    ),
    "{% for m in messages | list %}{% for c in (m.content or []) %}{{ c }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for c in m.get('content') %}{{ c }}{% endfor %}{% endfor %}",
    (
        "{% for m in (messages if true else []) %}{% for c in m.content %}{{ c }}{% endfor %}"
        "{% endfor %}"
    ),
    "{% for m in messages %}{% for c in m.content",
    "no messages at all",
    "{# {% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %} #}",
]
