"""`packlora schema`: the JSON schema of a run file, for editors that complete and check YAML.

It knows keys, types and ranges. What keys mean together is checked when a run file is read.
"""

from __future__ import annotations

from typing import Any

from packlora.config import Run

REFERENCE = {"type": "string", "pattern": r"\$\{"}
"""A number or a truth value may be a variable of the environment."""


def run_file_schema() -> dict[str, Any]:
    """JSON Schema of a run file, draft 2020-12."""
    schema = Run.model_json_schema()
    parts = schema["$defs"]
    for part in [*parts.values(), schema]:
        part["properties"] = {key: _or_reference(value) for key, value in part["properties"].items()}
    texts = {"type": "string", "minLength": 1}
    parts["DataConfig"]["properties"]["path"]["anyOf"][1]["items"] = {"anyOf": [texts, {"$ref": "#/$defs/DataSource"}]}
    for key, words in (("parallel", {"const": "auto"}), ("plans", texts)):
        own = schema["properties"][key]
        schema["properties"][key] = {"anyOf": [words, {"$ref": own.pop("$ref")}], **own}
    # a job need not have the keys that `defaults` sets
    parts["Defaults"] = {
        **parts["JobConfig"],
        "title": "Defaults",
        "description": "Keys of a job, for every job that does not say otherwise.",
        "properties": {key: value for key, value in parts["JobConfig"]["properties"].items() if key != "name"},
        "required": [],
    }
    parts["JobConfig"]["required"], parts["DataConfig"]["required"] = ["name"], []
    schema["properties"]["defaults"] = {"$ref": "#/$defs/Defaults"}
    schema["patternProperties"] = {"^x-": {}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "packlora run file",
        "description": "One frozen base model and the jobs that share it.",
    }


def _or_reference(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") not in ("integer", "number", "boolean") and not {"anyOf", "enum", "const"} & value.keys():
        return value
    outer: dict[str, Any] = {key: value[key] for key in ("default", "description", "title") if key in value}
    inner = {key: part for key, part in value.items() if key not in outer}
    kinds = inner.get("anyOf", [inner])
    return {**outer, "anyOf": [*kinds, REFERENCE]}
