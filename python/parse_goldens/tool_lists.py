"""The lists of tools in the requests of the goldens."""

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city"],
}
FILE_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
    "additionalProperties": False,
}
# A parameter of each type that vLLM distinguishes, and of types that it does not know.
VALUES_SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "enabled": {"type": "boolean"},
        "note": {"type": "string"},
        "nothing": {"type": "null"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "numbers": {"type": "array", "items": {"type": "integer"}},
        "rows": {
            "type": "array",
            "items": {"type": "object", "properties": {"id": {"type": "integer"}}},
        },
        "options": {
            "type": "object",
            "properties": {
                "depth": {"type": "integer"},
                "name": {"type": "string"},
                "inner": {"type": "object", "properties": {"on": {"type": "boolean"}}},
            },
        },
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "label": {"type": ["string", "null"]},
        "either": {"oneOf": [{"type": "boolean"}, {"type": "string"}]},
        "both": {"allOf": [{"type": "number"}]},
        "level": {"enum": [1, 2, 3]},
        "color": {"enum": ["red", "blue", None]},
        "alias": {"type": "int"},
        "anything": {},
        "pick": {"$ref": "#/$defs/pick"},
    },
    "$defs": {"pick": {"type": "integer"}},
}


def function(name, parameters=None, **more):
    about = {"name": name, "description": f"Does {name}."} | (
        {} if parameters is None else {"parameters": parameters}
    )
    return {"type": "function", "function": about | more}


WEATHER_TOOL = function("get_weather", WEATHER_SCHEMA)
NOW_TOOL = function("now", {"type": "object", "properties": {}})
WRITE_TOOL = function("write_file", FILE_SCHEMA)
VALUES_TOOL = function("set_values", VALUES_SCHEMA)
# A tool without parameters, not even an empty object.
PING_TOOL = function("ping")

TOOLS = {
    "all": [WEATHER_TOOL, NOW_TOOL, WRITE_TOOL, VALUES_TOOL, PING_TOOL],
    "one": [WEATHER_TOOL],
    "plain": [WEATHER_TOOL, NOW_TOOL, PING_TOOL],
    "strict": [function("get_weather", WEATHER_SCHEMA, strict=True), WRITE_TOOL, PING_TOOL],
    "values": [function("set_values", VALUES_SCHEMA, strict=True)],
    "defs": [
        function(
            "tree",
            {
                "type": "object",
                "properties": {"root": {"$ref": "#/$defs/node"}},
                "required": ["root"],
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {
                            "value": {"type": "integer"},
                            "next": {"$ref": "#/$defs/node"},
                        },
                    }
                },
            },
        )
    ],
}
