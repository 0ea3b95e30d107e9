"""Small templates with the features of Jinja and Python that chat templates use.

Each gets VARIABLES as kwargs.
"""

VARIABLES = dict(
    s="  Hello, Wörld! \n",
    e="",
    i=7,
    f=2.5,
    big=12345678901234567890,
    tiny=1e-7,
    huge=1e22,
    t=True,
    z={"n": None},
    l=[3, 1, 2],
    ls=["b", "A", "c"],
    d={"b": 1, "a": [1, {"x": None}], "é\"'": "q'", "items": "own"},
    nested=[{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
    schema={"properties": {"p": {"type": "string", "items": {"a": 1}}}},
    odd="\x1c\u00a0x\u2028y\x1f",
    quotes="it's",
    both='it\'s "so"',
    control="\x00\x1b\u200b\x7f\ue000 \U000e0001",
)

TEMPLATES = [
    # printing
    (
        "{{ s }}|{{ i }}|{{ f }}|{{ t }}|{{ z.n }}|{{ l }}|{{ d }}|{{ nothing }}|{{ tiny }}|"
        "{{ huge }}|{{ big }}"
    ),
    (
        "{{ 1.0 }} {{ 1e16 }} {{ 123456789.123 }} {{ -0.0 }} {{ 3 / 2 }} {{ 4 / 2 }} {{ 7 // 2 }} "
        "{{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }}"
    ),
    "{{ (1, 'a') }} {{ [1, 2.0, 'x', none, true] }} {{ {'k': [1]} }} {{ (1,) }} {{ [] }} {{ {} }}",
    "{{ quotes }} {{ [quotes, both, control, odd] }}",
    (
        "{{ 'a' ~ 1 ~ true ~ none ~ 'b' }} {{ 'x' + 'y' }} {{ '-' * 5 }} {{ [1] + [2] }} "
        "{{ 'ab' * 2 }}"
    ),
    "{{ l | string + '!' }} {{ t | string }} {{ f | string }} {{ z.n | string }}",
    # strings
    (
        "[{{ s.strip() }}][{{ s.lstrip() }}][{{ s.rstrip() }}][{{ s | trim }}][{{ odd.strip() }}]["
        "{{ odd | trim }}][{{ s.strip(' H!\n') }}]"
    ),
    (
        "{{ s.upper() }}{{ s.lower() }}{{ s.title() }}{{ s.strip().capitalize() }}{{ s | upper }}"
        "{{ s | trim | title }}{{ 'hELLO wORLD' | capitalize }}"
    ),
    (
        "{{ s.split() }}{{ s.split(',') }}{{ 'a--b--c'.split('--') }}{{ 'a b  c '.split(' ') }}"
        "{{ 'a b c'.split(None, 1) }}{{ 'a,b,c'.split(',', 1) }}"
    ),
    (
        "{{ 'a,b,c'.rsplit(',', 1) }}{{ ' a b  c '.rsplit(None, 1) }}"
        "{{ ' a b  c '.split(None, 1) }}{{ 'x'.split('</think>')[-1] }}{{ ''.split() }}"
        "{{ ''.split(',') }}"
    ),
    (
        "{{ s.startswith('  H') }}{{ s.endswith('\n') }}{{ s.startswith(('x', '  ')) }}"
        "{{ 'lo' in s }}{{ 'zz' not in s }}{{ s.find('l') }}{{ s.find('zz') }}{{ s.rfind('l') }}"
    ),
    (
        "{{ s.replace('l', 'L') }}{{ s.replace('l', 'L', 1) }}{{ s | replace('o', '0') }}"
        "{{ s.count('l') }}{{ 'aaa'.count('aa') }}"
    ),
    (
        "{{ 'abc'[0] }}{{ 'abc'[-1] }}{{ 'abc'[1:] }}{{ 'abc'[:-1] }}{{ 'abcdef'[::2] }}"
        "{{ 'abc'[::-1] }}{{ 'wörld'[1:3] }}"
    ),
    (
        "{{ 'a\\nb' }}{{ 'tab\\there' }}{{ 'uni\\u00e9' }}{{ 'back\\\\slash' }}{{ \"dq\\\"\" }}"
        "{{ 'sq\\'' }}{{ '\\x41' }}"
    ),
    (
        "{{ ', '.join(ls) }}{{ ls | join(', ') }}{{ l | join('-') }}"
        "{{ nested | join(',', attribute='k') }}{{ nested | map(attribute='k') | join }}"
    ),
    (
        "{{ 'x'.isdigit() }}{{ '12'.isdigit() }}{{ 'ab'.isalpha() }}{{ 'a1'.isalnum() }}"
        "{{ ' '.isspace() }}{{ 'A'.isupper() }}{{ 'a'.islower() }}"
    ),
    (
        "{{ 'prefix_x'.removeprefix('prefix_') }}{{ 'x.py'.removesuffix('.py') }}{{ 'a\nb\r\n"
        "c'.splitlines() }}{{ 'k=v=w'.partition('=')[2] }}"
    ),
    "{{ '%s is %d' | format('x', 3) }}{{ '{} {}'.format('a', 1) }}",
    "{{ '%s' % 'x' }}",
    (
        "{{ s | length }}{{ l | length }}{{ d | length }}{{ l | count }}{{ '北京👩' | length }}"
        "{{ s | trim | first }}{{ l | last }}"
    ),
    (
        "{{ 'line1\nline2\z.n\nline3' | indent }}|{{ 'a\nb' | indent(2) }}|{{ 'a\n"
        "b' | indent(2, true) }}|{{ 'a\z.n\nb' | indent(2, first=true, blank=true) }}"
    ),
    # tests
    (
        "{{ s is string }}{{ i is string }}{{ d is mapping }}{{ l is mapping }}{{ l is iterable }}"
        "{{ s is iterable }}{{ d is iterable }}{{ i is iterable }}"
    ),
    (
        "{{ l is sequence }}{{ s is sequence }}{{ d is sequence }}{{ i is number }}"
        "{{ t is number }}{{ f is float }}{{ i is integer }}{{ t is integer }}{{ t is boolean }}"
    ),
    (
        "{{ z.n is none }}{{ e is none }}{{ x is defined }}{{ x is undefined }}"
        "{{ z.n is defined }}{{ t is true }}{{ i is true }}{{ t is false }}{{ 1 is odd }}"
        "{{ 2 is even }}"
    ),
    (
        "{{ i is eq 7 }}{{ i is equalto 7 }}{{ i is ne 7 }}{{ i is gt 3 }}{{ i is in [7] }}"
        "{{ 'A' is upper }}{{ z.n is not none }}{{ i is divisibleby 7 }}{{ s is callable }}"
    ),
    (
        "{{ 1 == 1.0 }}{{ true == 1 }}{{ 'a' < 'b' }}{{ 1 < 2 < 3 }}{{ none == false }}"
        "{{ [] == [] }}{{ {'a': 1} == {'a': 1} }}{{ 'a' == 'A' }}"
    ),
    (
        "{{ not x }}{{ x or 'd' }}{{ e or 'd' }}{{ i and 'y' }}{{ [] or {} or 0 or 'end' }}"
        "{{ not [] and not '' }}{{ x is not defined or x }}"
    ),
    # dicts and lists
    (
        "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }},"
        "{% endfor %}{{ d.keys() | list }}{{ d.values() | list }}"
    ),
    (
        "{% for k, v in d | items %}{{ k }};{% endfor %}{% for k, v in d | dictsort %}{{ k }};"
        "{% endfor %}{{ d.get('b') }}{{ d.get('z') }}{{ d.get('z', 5) }}{{ 'b' in d }}{{ d.b }}"
        "{{ d['b'] }}"
    ),
    (
        "{% for name, p in schema.properties.items() %}{{ name }}:{{ p.type }}:{{ p['items'] }}:"
        "{{ p['items'].a }}{% for k, v in p.items() %}/{{ k }}{% endfor %}{% endfor %}"
    ),
    (
        "{{ l | sort }}{{ ls | sort }}{{ ls | sort(case_sensitive=true) }}"
        "{{ l | sort(reverse=true) }}{{ l | reverse | list }}{{ l | max }}{{ l | min }}"
        "{{ l | sum }}{{ l[::-1] }}"
    ),
    (
        "{{ nested | selectattr('k', 'equalto', 'x') | map(attribute='v') | list }}"
        "{{ nested | rejectattr('k', 'eq', 'x') | list }}{{ l | select('gt', 1) | list }}"
        "{{ l | reject('odd') | list }}"
    ),
    (
        "{{ nested | selectattr('v') | list | length }}{{ l | map('string') | join }}"
        "{{ ls | map('upper') | list }}{{ nested | map(attribute='z', default='-') | list }}"
        "{{ ls | unique | list }}"
    ),
    (
        "{% for g, rows in nested | groupby('k') %}{{ g }}:{{ rows | length }};{% endfor %}"
        "{{ l | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ dict(a=1, b='x') }}"
        "{{ l | first }}"
    ),
    (
        "{{ x | default('d') }}{{ z.n | default('d') }}{{ z.n | default('d', true) }}"
        "{{ e | default('d', boolean=true) }}{{ (d.a | last).x }}{{ l.index(1) }}{{ l.count(1) }}"
        "{{ f | int }}{{ '5' | int + 1 }}{{ f | round }}"
    ),
    # control flow
    (
        "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}"
        "{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}"
        "{{ loop.cycle('a', 'b') }};{% endfor %}"
    ),
    (
        "{% for x in l if x > 1 %}{{ loop.index }}{{ x }}{% else %}none{% endfor %}"
        "{% for x in [] %}{% else %}empty{% endfor %}{% for x in l %}{% if x == 1 %}{% continue %}"
        "{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    (
        "{% for k, v in d.items() %}{{ k }}{% if not loop.last %},{% endif %}{{ loop.length }}"
        "{% endfor %}{% for k in d %}{{ loop.last }}{% endfor %}{% for k in d.keys() %}"
        "{{ loop.last }}{% endfor %}{% for k in d.values() %}{{ loop.revindex0 }}{% endfor %}"
    ),
    (
        "{% for k, v in d | items %}{{ loop.last }}{% endfor %}{% for k, v in d | dictsort %}"
        "{{ loop.last }}{% endfor %}{% for x in l | reverse %}{{ loop.last }}{% endfor %}"
        "{% for x in l[::-1] %}{{ loop.last }}{% endfor %}{% for x in range(3) %}{{ loop.last }}"
        "{% endfor %}"
    ),
    (
        "{% for x in nested | selectattr('k', 'eq', 'x') %}{{ x.v }}{{ loop.last }}{% endfor %}"
        "{% for x in nested | map(attribute='v') %}{{ loop.last }}{% endfor %}"
        "{% for x in l if x > 1 %}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{% endfor %}"
        "{% for x in l | unique %}{{ loop.last }}{% endfor %}"
    ),
    "{% for c in 'añ👩' %}{{ c }}{% endfor %}",
    "{% for c in 'abc' %}{{ loop.last }}{% endfor %}",
    (
        "{% set ns = namespace(a=0, b=[]) %}{% for x in l %}{% set ns.a = ns.a + x %}"
        "{% set ns.b = ns.b + [x] %}{% endfor %}{{ ns.a }}{{ ns.b }}"
    ),
    (
        "{% set x = 1 %}{% for y in l %}{% set x = y %}{% endfor %}{{ x }}{% if true %}"
        "{% set x = 9 %}{% endif %}{{ x }}{% set a, b = 1, 2 %}{{ a }}{{ b }}"
    ),
    (
        "{% macro m(a, b='B', c=none) %}<{{ a }}{{ b }}{{ c }}{{ caller() if caller else '' }}>"
        "{% endmacro %}{{ m(1) }}{{ m(1, c=2) }}{% call m(3) %}body{% endcall %}"
        "{{ m('x') | length }}"
    ),
    (
        "{% macro deep(v) %}{% if v is mapping %}{% for k, w in v.items() %}{{ k }}({{ deep(w) }})"
        "{% endfor %}{% else %}{{ v }}{% endif %}{% endmacro %}{{ deep(schema) }}"
    ),
    (
        "{% set block %}captured {{ i }}{% endset %}[{{ block }}]{% filter upper %}low"
        "{% endfilter %}{% with q = 3 %}{{ q }}{% endwith %}{{ q }}"
    ),
    (
        "{% raw %}{{ raw }}{% endraw %}{# comment #}{% generation %}{% set g = 1 %}{{ i }}"
        "{% endgeneration %}{{ g is defined }}"
    ),
    (
        "{{ range(3) | list }}{{ range(1, 4) | list }}{{ range(6, 0, -2) | list }}"
        "{{ 'a' if i > 3 else 'b' }}{{ 'a' if false }}|{{ (i > 3) | string }}"
    ),
    (
        "{% for m in nested recursive %}{{ m.k }}{% endfor %}{% set l2 = l + [9] %}{{ l2[-1] }}"
        "{{ l2[1:3] }}{{ l2[:2] }}{{ l2[99:] }}{{ nested[0]['k'] }}{{ nested[-1].v }}"
    ),
    "{{ raise_exception('stop ' ~ i) }}",
    (
        "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d %H:%M:%S %A %B %j %%') }}|"
        "{{ strftime_now('%-d') }}"
    ),
    # tojson
    (
        "{{ d | tojson }}{{ s | tojson }}{{ t | tojson }}{{ z.n | tojson }}{{ f | tojson }}"
        "{{ tiny | tojson }}{{ huge | tojson }}{{ big | tojson }}{{ control | tojson }}"
        "{{ '<&>' | tojson }}"
    ),
    (
        "{{ d | tojson(indent=2) }}\n{{ d | tojson(indent=0) }}\n"
        "{{ nested | tojson(indent=4, ensure_ascii=true) }}\n{{ [] | tojson(indent=2) }}"
        "{{ {} | tojson(indent=2) }}"
    ),
    (
        "{{ d | tojson(ensure_ascii=true) }}{{ d | tojson(sort_keys=true) }}"
        "{{ d | tojson(separators=(',', ':')) }}{{ d | tojson(true) }}"
        "{{ d | tojson(indent='--') }}{{ {1: 2, none: 3, false: 4} | tojson }}"
        "{{ '👩' | tojson(ensure_ascii=true) }}{{ (1, 2) | tojson }}"
    ),
    # white space
    "a\n  {% if t %}\n  b\n  {% endif %}\nc\n\n",
    "a\n  {%- if t -%}\n  b\n  {%- endif %}\nc {{- i -}} \n d\n",
    "  {%+ if t %}x{% endif +%}\n  {# c #}\n  y {# c -#} \n z",
    "{% for x in l %}\n  {{ x }}\n{% endfor %}\n\t{% set z = 1 %}\n{{ z }}\n",
    "line\r\n  {% if t %}\r\nyes\r\n{% endif %}\r\nend\r\n",
    "{%- for x in l %}\n{{- x }}\n{% endfor -%}\n\n{{ '\n' }}{% if t %} {% endif %}\n\n",
    # failures
    (
        "{% for x in l %}{% for y in l %}{{ loop.index }}{% endfor %}{{ loop.index }}"
        "{{ loop.depth }}{% endfor %}{% for x in l %}{{ loop.changed(x > 2) }}{% endfor %}"
    ),
    (
        "{% set x = none %}{{ x is none }}{% set d2 = dict(d, z=1) %}{{ d2.z }}{{ d2 | length }}"
        "{{ (d.a + [1]) | length }}{{ 'k' in {'k': none} }}{{ {'a': {'b': 1}}['a']['b'] }}"
        "{{ {'a': 1}.a }}"
    ),
    (
        "{{ 10 // 3 * 3 + 10 % 3 }}{{ -2 ** 2 }}{{ 2 ** -1 }}{{ 1 / 3 }}{{ 0.1 + 0.2 }}{{ 1e3 }}"
        "{{ 1_000 }}{{ 0x1f }}{{ (2.0) | int }}{{ 7 / 7 }}{{ 3 * 1.0 }}{{ 1 + true }}"
        "{{ 5 | float }}{{ 2.675 | round(2) }}{{ 3.7 | round | int }}{{ -3.5 | abs }}"
    ),
    (
        "{{ not true and false or true }}{{ 1 in [1] and not 2 in [1] }}{{ 'a' 'b' }}"
        "{{ 1 if none else 2 if false else 3 }}{{ (1 if true) | string }}{{ [1, 2][-1:] }}"
        "{{ 'x' * 0 }}|{{ [0] * 3 }}{{ -i }}{{ 'A' ~ 'b' | upper }}"
    ),
    (
        "{{ 'a' is in 'abc' }}{{ 'a' is not in ['b'] }}{{ [] is defined }}{{ d.items is defined }}"
        "{{ d.zzz is defined }}{{ d.b is defined and d.b }}{{ l is not string and l is iterable }}"
        "{{ nested is sequence and nested[0] is mapping }}"
    ),
    "{{ '<|' + 'x' + '|>' }}{{ '<b>' | e }}{{ '<b>' | safe }}{{ '<b>' | escape }}",
    "{{ 'abc'.index('c') }}",
    "{{ 'a'.ljust(3) }}",
    "{{ +i }}",
    "{{ cycler('a', 'b').next() }}",
    "{{ d.copy() }}{{ d.pop('b') }}",
    "{{ l.append(4) }}",
    "{{ l.copy() }}{{ namespace is defined }}{{ range is defined }}{{ lipsum2 is defined }}",
    (
        "{{ nested | sort(attribute='v', reverse=true) | map(attribute='v') | list }}"
        "{{ nested | sum(attribute='v') }}{{ nested | tojson | length }}"
        "{{ [[1, 2], [3]] | map('first') | list }}{{ ['a', ''] | select | list }}"
        "{{ [1, none] | reject('none') | list }}"
    ),
    "{{ x.y }}",
    "{{ x['y'] }}",
    "{{ 'a' + 1 }}",
    "{{ z.n | length }}",
    "{% for a in z.n %}{% endfor %}",
    "{{ d.nope.deeper }}",
    "{{ undefined_function() }}",
    "{{ s.nope() }}",
    "{{ z.n + 'a' }}",
    "{{ x + 'a' }}",
    "{{ l | tojson(nope=1) }}",
    "{{ x | tojson }}",
    (
        "[{% for a in x %}{% endfor %}][{{ x | length }}][{{ x | join }}][{{ 'a' in x }}]["
        "{{ d.nope }}][{{ l[99] }}][{{ x ~ 'a' }}][{{ x == none }}][{{ x | list }}]"
    ),
]
