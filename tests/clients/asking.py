"""What the Python clients ask for."""

MODEL = "tiny"
CHAT = [{"role": "user", "content": "Tell me"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "clock", "description": "The time somewhere", "parameters": SCHEMA},
}
LONG = "x" * 3000
BIG = "x" * 100_000
