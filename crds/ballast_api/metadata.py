"""The metadata of every kind of resource."""

from __future__ import annotations

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from ballast_api.base import ApiModel


class Metadata(ApiModel):
    """The metadata that Ballast reads. Other fields are kept."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})
