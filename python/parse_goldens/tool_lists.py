"""The lists of tools that the requests of the goldens have."""

WEATHER = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"},
                                            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}
FILE = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"], "additionalProperties": False}
# A parameter of each type that vLLM tells apart, and of types that it can't tell.
VALUES = {"type": "object", "properties": {
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "enabled": {"type": "boolean"},
    "note": {"type": "string"},
    "nothing": {"type": "null"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "numbers": {"type": "array", "items": {"type": "integer"}},
    "rows": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
    "options": {"type": "object", "properties": {"depth": {"type": "integer"}, "name": {"type": "string"},
                                                 "inner": {"type": "object", "properties": {"on": {"type": "boolean"}}}}},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "label": {"type": ["string", "null"]},
    "either": {"oneOf": [{"type": "boolean"}, {"type": "string"}]},
    "both": {"allOf": [{"type": "number"}]},
    "level": {"enum": [1, 2, 3]},
    "color": {"enum": ["red", "blue", None]},
    "alias": {"type": "int"},
    "anything": {},
    "pick": {"$ref": "#/$defs/pick"},
}, "$defs": {"pick": {"type": "integer"}}}


def function(name, parameters=None, **more):
    about = {"name": name, "description": f"Does {name}."} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": about | more}


WEATHER_TOOL = function("get_weather", WEATHER)
NOW = function("now", {"type": "object", "properties": {}})
WRITE = function("write_file", FILE)
VALUES_TOOL = function("set_values", VALUES)
# No parameters at all, not even an empty object.
BARE = function("ping")

TOOLS = {
    "all": [WEATHER_TOOL, NOW, WRITE, VALUES_TOOL, BARE],
    "one": [WEATHER_TOOL],
    "plain": [WEATHER_TOOL, NOW, BARE],
    "strict": [function("get_weather", WEATHER, strict=True), WRITE, BARE],
    "values": [function("set_values", VALUES, strict=True)],
    "defs": [function("tree", {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "required": ["root"], "$defs": {
        "node": {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}}})],
}
