"""The model and a real API server accept the same resources, and refuse the others with the same words."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from control_plane import ControlPlane
from every_field import EVERYTHING, SPEC, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import API_VERSION, KIND, PLURAL
from ballast_api.structural import leaves

PERCENT = st.sampled_from([0, 0.1, 10, 33.3, 50, 99.95, 100])
FEW = st.integers(0, 3)


def some(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for objects with any of these members."""
    return st.fixed_dictionaries({}, optional=members)


MODELS = st.fixed_dictionaries(
    {
        "uri": st.sampled_from(
            [
                "hf://a/b",
                "s3://b/c",
                "pvc://c/d",
                "file:///e",
                "file://localhost/e",
                "file://e",
                "file://e/f",
                "file:///",
                "a/b",
                "ftp://x",
                "hf://",
                "hf://a",
                "hf://a/b/",
                "hf://a/b@v1",
                "hf://a/b@v1/",
                "hf://a/b@",
                "hf://a/b@x@v1",
                "hf://a/b@/v1//",
                "hf:///a/b",
                "s3://a]b/c",
                "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint:weights/llama",
                "pvc://[c",
                "pvc://c",
                "pvc://c/./..a//.../a..",
                "pvc://c/../a",
                "pvc://c/a\nb",
            ]
        )
    },
    optional={
        "revision": st.sampled_from(["", "v1", "v2"]),
        "servedName": st.sampled_from(["a", "b"]),
        "cachePath": st.just("/cache"),
        "cache": some(persistentVolumeClaim=st.just({"claimName": "c"}), volumeClaimTemplate=st.just({"spec": {}})),
        "sizeLimitGibibytes": st.just(1),
        "credentialsSecret": st.just("secret"),
    },
)
TENANTS = st.lists(some(reservedPercent=PERCENT, weight=st.just(2)), max_size=3).map(
    lambda tenants: [{"name": f"t{number}"} | tenant for number, tenant in enumerate(tenants)]
)
ADAPTERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b", "a/b"]), "uri": st.sampled_from(["hf://a/a", "pvc://a/b", "hf://a"])},
        optional={"tenants": st.lists(st.just("t"), max_size=1)},
    ),
    max_size=1,
)
ALIASES = st.lists(st.sampled_from(["a", "b", "a/b", "c"]), max_size=2, unique=True)
BACKENDS = st.sampled_from(["native", "vllm"])
ARGUMENTS = st.sampled_from(
    ["--enforce-eager", "--port", "--port=1", "--no-enable_lora", "-tp", "--data-parallel-size=2", "--watermark.a=b",
     "--max-loras=2", "--revision=a", "--tokenizer-revision=a", "--api-key", "--load-format=pt", "x", "--portal",
     "--headless", "--headless\n", "--config={\n}", "--portal\n--port=1"]
)  # fmt: skip
PEERS = st.lists(st.just({"podSelector": {}}), max_size=1)
QUANTITIES = st.dictionaries(
    st.sampled_from(
        ["cpu", "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/mig-1g.10gb", "a.com/gpu", "amd.com/gpu"]
    ),
    st.just(1),
    max_size=2,
)
VOLUMES = st.fixed_dictionaries(
    {"name": st.sampled_from(["v", "models", "models-2", "claim-", "claim-1", "tls"])},
    optional={
        "persistentVolumeClaim": st.fixed_dictionaries({"claimName": st.sampled_from(["a", "b", "c", "d", "e"])}),
    },
)
PARTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "model": st.fixed_dictionaries({"model": MODELS}),
    "files": st.fixed_dictionaries(
        {
            "model": st.fixed_dictionaries(
                {"uri": st.sampled_from(["hf://a/b", "pvc://c/d"])},
                optional={
                    "adapters": ADAPTERS,
                    "cachePath": st.just("/cache"),
                    "cache": st.just({"persistentVolumeClaim": {"claimName": "c"}}),
                    "sizeLimitGibibytes": st.just(1),
                    "credentialsSecret": st.just("secret"),
                },
            )
        },
        optional={
            "engine": some(
                speculative=st.fixed_dictionaries(
                    {"method": st.just("draftModel"), "draftUri": st.sampled_from(["s3://b/c", "file:///e"])}
                )
            )
        },
    ),
    "gpu": some(
        gpu=some(
            count=FEW,
            resourceName=st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]),
            resourceClaimTemplate=st.just("one"),
        )
    ),
    "engine": some(
        engine=some(
            backend=BACKENDS,
            quantization=st.just("int8"),
            kvDtype=st.sampled_from(["auto", "fp8"]),
            attention=st.sampled_from(["auto", "sdpa"]),
            blockTokens=st.sampled_from([16, 32]),
            speculative=st.fixed_dictionaries(
                {"method": st.sampled_from(["ngram", "draftModel"])},
                optional={"draftUri": st.sampled_from(["hf://a/b", "hf://a"])},
            ),
        ),
        gpu=some(count=FEW),
    ),
    "arguments": some(
        engine=some(backend=BACKENDS, vllm=some(args=st.lists(ARGUMENTS, max_size=2))), gpu=some(count=FEW)
    ),
    "backend": some(
        engine=some(backend=BACKENDS),
        gpu=some(count=FEW),
        network=some(metricsFrom=PEERS),
        model=st.fixed_dictionaries(
            {
                "uri": st.sampled_from(
                    ["hf://a/b", "hf://a/b@c/a", "s3://a/b//", "s3://a/b@v1", "s3://a/b@v1/a", "pvc://b"]
                )
            },
            optional={"adapters": ADAPTERS, "aliases": ALIASES, "servedName": st.sampled_from(["a", "b/a"])},
        ),
    ),
    "shares": some(offline=some(reservedPercent=PERCENT, maxPercent=PERCENT)),
    "tenants": some(offline=some(tenants=TENANTS)),
    "scaling": some(
        scaling=st.fixed_dictionaries(
            {"maxReplicas": st.integers(1, 3)}, optional={"minReplicas": FEW, "offlineMaxReplicas": FEW}
        )
    ),
    "rollout": some(rollout=some(maxSurge=FEW, maxUnavailable=FEW)),
    "env": some(
        template=some(
            env=st.lists(
                st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(
                            [
                                "A",
                                "BALLAST",
                                "BALLAST_",
                                "BALLAST_SLO",
                                "BALLAST_KEEP_FREE_PERCENT",
                                "BALLAST_MEDIA_MEBIBYTES",
                            ]
                        )
                    }
                ),
                max_size=2,
                unique_by=lambda variable: variable["name"],
            )
        )
    ),
    "devices": some(
        gpu=some(resourceName=st.just("a.com/gpu")),
        template=some(resources=some(requests=QUANTITIES, limits=QUANTITIES)),
    ),
    "volumes": st.fixed_dictionaries(
        {
            "model": st.fixed_dictionaries(
                {"uri": st.sampled_from(["hf://a/b", "pvc://a", "pvc://b/c"])},
                optional={
                    "adapters": st.just([{"name": "x", "uri": "pvc://c/d"}]),
                    "cache": st.just({"persistentVolumeClaim": {"claimName": "d"}}),
                },
            )
        },
        optional={
            "engine": st.just({"speculative": {"method": "draftModel", "draftUri": "hf://a/b"}}),
            "template": some(volumes=st.lists(VOLUMES, max_size=2, unique_by=lambda volume: volume["name"])),
        },
    ),
    "slo": st.fixed_dictionaries(
        {"slo": some(ttftMilliseconds=st.just(1), tpotMilliseconds=st.just(1), latencyMilliseconds=st.just(1))},
        optional={"engine": some(backend=BACKENDS), "gpu": some(count=FEW)},
    ),
    "submitters": some(
        redis=st.just({"secretName": "s"}),
        offline=some(tenants=st.lists(st.just({"name": "t"}), max_size=1)),
        queueAccess=some(
            submitters=st.lists(
                st.fixed_dictionaries(
                    {"secretName": st.sampled_from(["a-ballast-submitter", "a-ballast-submitter-b"])},
                    optional={"tenant": st.sampled_from(["t", "u"])},
                ),
                max_size=1,
            )
        ),
    ),
    "ray": some(
        runtime=some(ray=some(nodes=st.integers(1, 3))),
        engine=some(backend=BACKENDS),
        gpu=some(count=FEW),
        scaling=st.just({"maxReplicas": 2}),
        network=some(tlsSecret=st.just("tls")),
    ),
    "network": some(network=some(policy=st.booleans(), ingressFrom=PEERS, metricsFrom=PEERS)),
}
"""Tested one by one. In a spec with several wrong parts, the other parts would hide a wrong rule."""
NAMES = st.sampled_from(["a", "a-b", "a" * 40, "a" * 41, "a" * 52, "a" * 53, "7b"])


@pytest.mark.envtest
@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_model_and_the_api_server_agree(plane: ControlPlane, part: str, data: st.DataObject) -> None:
    spec = {"model": {"uri": "hf://a/b"}} | data.draw(PARTS[part])
    name = data.draw(NAMES) if part in {"model", "ray"} else "a"
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    try:
        InferenceDeployment.read(manifest, "here")
        problems = []
    except InvalidConfig as error:
        problems = [problem.split(": ", 1)[1].split(" (found")[0] for problem in error.problems]

    answer = asked(plane, manifest)

    assert (answer["kind"] == "Status") == bool(problems), answer.get("message")
    for sentence in (part for problem in problems for part in problem.split("; ")):
        assert sentence in answer["message"]


@pytest.mark.envtest
@pytest.mark.parametrize("leaf", leaves(SPEC))
def test_the_model_and_the_api_server_accept_the_same_values(plane: ControlPlane, leaf: str) -> None:
    manifests = [with_value(leaf, value) for value in VALUES]

    assert [is_accepted_by_model(each) for each in manifests] == [is_accepted_by(plane, each) for each in manifests]


VALUES: tuple[Any, ...] = (
    True,
    0,
    1,
    -1,
    1.5,
    100,
    10**7,
    "",
    "x",
    "A b",
    [],
    ["x"],
    [{}],
    {"a": "b"},
    {"a": {"b": 1}},
)
"""Values of every kind, without whole floats, which the API server accepts only for some integers."""


def with_value(leaf: str, value: Any) -> dict[str, Any]:
    """Return the sample of every field with another value in one place."""
    manifest = deepcopy(EVERYTHING)
    if leaf.startswith("queueAccess.submitters"):  # they exclude a Redis of the resource's own
        del manifest["spec"]["redis"]
        tenant = manifest["spec"]["offline"]["tenants"][0]["name"]
        manifest["spec"]["queueAccess"]["submitters"] = [{"secretName": "a-ballast-submitter", "tenant": tenant}]
    put(manifest["spec"], leaf, value)
    return manifest


def is_accepted_by_model(manifest: dict[str, Any]) -> bool:
    try:
        InferenceDeployment.read(manifest, "here")
    except InvalidConfig:
        return False
    return True


def is_accepted_by(plane: ControlPlane, manifest: dict[str, Any]) -> bool:
    return bool(asked(plane, manifest)["kind"] == KIND)


def asked(plane: ControlPlane, manifest: dict[str, Any]) -> Any:
    """Return the answer of the API server to a dry run."""
    path = f"/apis/{API_VERSION}/namespaces/default/{PLURAL}"
    return plane.http.post(path, params={"dryRun": "All", "fieldValidation": "Strict"}, json=manifest).json()
