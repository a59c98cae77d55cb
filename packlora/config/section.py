"""Sections of a run file whose models stand in a plug-in, which is imported where a run file has such a section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class Section:
    """Annotation of the key of such a section, which may be null.

    Args:
        model: gives the model of the section.
    """

    def __init__(self, model: Callable[[], type[BaseModel]]) -> None:
        self.model = model

    def _read(self, value: Any) -> Any:
        return None if value is None else self.model().model_validate(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core_schema.nullable_schema(self.model().__pydantic_core_schema__))
