"""Models that users write into a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import yaml
from pydantic import ValidationError

from ballast_api.base import STORED, ApiModel
from ballast_api.errors import InvalidConfig


class YamlFile(ApiModel):
    """A model that is read from a YAML file. A missing field has its default."""

    @classmethod
    def parse(
        cls, text: str, source: str, defaults: Mapping[str, object] | None = None, *, is_stored: bool = False
    ) -> Self:
        """Parse YAML. `defaults` has values of fields that the text may leave out.

        `is_stored` states that a part of the text is from a resource that the API server has admitted, maybe by the
        rules of an older version.

        Raises:
            InvalidConfig: The message names each wrong field, what was found there, and what was expected.
        """
        try:
            data = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that no calendar has
            raise InvalidConfig(source, [str(error)]) from error
        except RecursionError as error:
            raise InvalidConfig(source, ["is nested too deeply"]) from error
        data = {} if data is None else data
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise InvalidConfig(source, [f"found {type(data).__name__}, expected a mapping with names as keys"])
        try:
            return cls.model_validate({**(defaults or {}), **data}, context={STORED: is_stored})
        except ValidationError as error:
            raise InvalidConfig(source, InvalidConfig.sentences(error)) from error

    @classmethod
    def load(cls, path: Path, defaults: Mapping[str, object] | None = None) -> Self:
        """Load a YAML file; see `parse`."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidConfig(str(path), [f"cannot be read: {error.strerror}"]) from error
        except UnicodeDecodeError as error:
            raise InvalidConfig(str(path), [str(error)]) from error
        return cls.parse(text, str(path), defaults)
