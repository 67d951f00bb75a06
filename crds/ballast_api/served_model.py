"""The model of a resource: where it is, what clients call it, and where its files stay. A change rolls the pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ballast_api.base import ApiModel
from ballast_api.pods import Json, SecretName
from ballast_api.rules import Rule
from ballast_api.sections import LOCATION, LOCATIONS, Model, is_location

ClaimName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class SharedClaim(ApiModel):
    """A PersistentVolumeClaim for all pods of the resource. It must exist in the resource's namespace."""

    claim_name: ClaimName
    """Name of the claim. Pods on several nodes need a claim with access mode ReadWriteMany. Several resources may use
    the same claim. It keeps each version that was fetched, in a directory of its own: delete those that no pod uses."""


class ModelCache(ApiModel):
    """A volume for the files that a pod fetches. Set one of the two fields."""

    rules = (
        Rule(
            "has(self.persistentVolumeClaim) != has(self.volumeClaimTemplate)",
            lambda cache: (cache.persistent_volume_claim is None) != (cache.volume_claim_template is None),
            "model.cache needs either persistentVolumeClaim (one claim for all pods) or volumeClaimTemplate (a claim "
            "for each pod). Set one of them",
        ),
    )

    persistent_volume_claim: SharedClaim | None = None
    volume_claim_template: Json | None = None
    """Template of a claim that Kubernetes makes for each pod and deletes with the pod, as in an ephemeral volume, e.g.
    `{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 100Gi}}}}`."""


def default_served_name(uri: str) -> str:
    """Return the served name of a model whose resource sets none. A revision on `hf://` may contain slashes."""
    place = uri.partition("@")[0] if uri.startswith("hf://") else uri
    return place.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


def name_of(model: Model) -> str:
    """Return the name that clients use for a model."""
    return model.served_name or default_served_name(model.uri)


def _revision_in(uri: str) -> str:
    """Return the revision that follows `@` in a URI, as `ballast fetch` reads it."""
    return uri.partition("@")[2].rstrip("/") if uri.startswith("hf://") else ""


SERVED_NAME = (
    "[has(self.servedName) ? self.servedName : "
    "(self.uri.startsWith('hf://') ? self.uri.split('@')[0] : self.uri).find('[^/]+/*$').split('@')[0].split('/')[0]]"
)
"""CEL expression over a `ServedModel`: a list with its served name."""


class ServedModel(Model):
    """The model, and how a pod gets it. A change of this section rolls the pods."""

    rules = (
        Rule(f"self.uri.matches('{LOCATION}')", lambda model: is_location(model.uri), f"model.uri must be {LOCATIONS}"),
        Rule(
            "!has(self.revision) || self.revision == '' || !self.uri.startsWith('hf://') || "
            "self.uri.find('@.*[^/]') in ['', '@' + self.revision]",
            lambda model: not model.revision or _revision_in(model.uri) in {"", model.revision},
            "model.revision and the part of model.uri after @ name two revisions. Remove one of them",
        ),
        Rule(
            f"!has(self.adapters) || {SERVED_NAME}.all(name, self.adapters.all(each, each.name != name))",
            lambda model: name_of(model) not in {each.name for each in model.adapters},
            "model.adapters contains an adapter with the name of the model. Use another name, or set model.servedName",
        ),
        Rule(
            f"!has(self.aliases) || {SERVED_NAME}.all(name, self.aliases.all(alias, alias != name)) && "
            "(!has(self.adapters) || self.adapters.all(each, self.aliases.all(alias, alias != each.name)))",
            lambda model: {name_of(model), *(each.name for each in model.adapters)}.isdisjoint(model.aliases),
            "model.aliases contains the name of the model or of an adapter, which clients use already. Remove it from "
            "the list",
        ),
        Rule(
            "!(has(self.cachePath) && has(self.cache))",
            lambda model: model.cache_path is None or model.cache is None,
            "model.cachePath and model.cache both name a place for fetched files. Remove one of them",
        ),
        Rule(
            "!has(self.sizeLimitGibibytes) || !(has(self.cachePath) || has(self.cache))",
            lambda model: model.size_limit_gibibytes is None or (model.cache_path is None and model.cache is None),
            "model.sizeLimitGibibytes limits the emptyDir that holds fetched files. model.cachePath and model.cache "
            "replace this emptyDir. Remove sizeLimitGibibytes",
        ),
    )

    uri: str = Field(min_length=1, max_length=2048, examples=["hf://Qwen/Qwen3-8B"])
    """`hf://owner/name`, `s3://bucket/prefix`, `pvc://claim/path`, or `file:///directory`. With `pvc://`, the whole
    claim is mounted read-only at `/models`, so `template.volumes` must not name it. With `file://`, the image or a
    volume of the template contains the directory."""
    revision: str = Field(default="", max_length=253)
    """Version of the weights: on `hf://` a branch, tag or commit, elsewhere any name. A partly generated answer is
    continued only under the same revision, and, unless it is a commit of 40 hexadecimal digits, only with the same
    files."""
    credentials_secret: SecretName | None = None
    """Secret whose keys become environment variables of the containers that fetch the model, its adapters and its draft
    model, e.g. `HF_TOKEN`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL`."""
    cache_path: str | None = Field(default=None, max_length=1024, pattern=r"^/[^:]*$")
    """Directory of the node that keeps fetched models for all pods of a namespace on the node. In it, each namespace
    has a directory of its own, which the kubelet creates with the same mode. The user of the image (65532 in Ballast's
    own) needs write access to it, e.g. by mode 1777. Namespaces with Pod Security level baseline or restricted forbid
    `cachePath`: use `cache` there. The directory keeps each version that was fetched, in a directory of its own: delete
    those that no pod uses. Without `cachePath` and `cache`, each pod fetches the model to an emptyDir. A fetch to the
    disk of the node leaves 15 % of it free, below which the kubelet evicts pods by default. The variable
    `BALLAST_KEEP_FREE_PERCENT` in `template.env` changes the share."""
    cache: ModelCache | None = None
    size_limit_gibibytes: int | None = Field(default=None, ge=1, le=1_048_576)
    """Size limit of the emptyDir that holds fetched files. Kubernetes evicts a pod that exceeds it. By default only
    the disk of the node limits the size."""
