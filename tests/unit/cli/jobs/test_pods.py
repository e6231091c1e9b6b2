"""Launch options in a pod, and the manifests of the documents."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autockpt.cli.doctor.machine import _pod
from autockpt.cli.jobs.pods import launching_in_pods
from autockpt.values.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "nproc_per_node": "1", "nnodes": "1", "node_rank": 0, "max_restarts": None,
    "rdzv_backend": "c10d", "rdzv_endpoint": "", "rdzv_id": "", "rdzv_conf": "",
}  # fmt: skip
TRAIN_JOB = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500",
}  # fmt: skip
SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())["definitions"]
KINDS = {
    "trainer.kubeflow.org/v1alpha1/TrainJob": "trainer.v1alpha1.TrainJob",
    "jobset.x-k8s.io/v1alpha2/JobSet": "jobset.v1alpha2.JobSet",
    "batch/v1/Job": "io.k8s.api.batch.v1.Job",
    "v1/Service": "io.k8s.api.core.v1.Service",
}
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "boolean": bool,
}  # fmt: skip
DOCUMENT = Path(__file__).parents[4] / "docs" / "howto" / "launch" / "kubernetes.md"


def made(environ: dict[str, str], *given: str, **written: Any) -> dict[str, Any]:
    """The options that differ from the defaults."""
    found = launching_in_pods(environ, {**DEFAULTS, **written}, given)
    return {name: value for name, value in found.items() if value != DEFAULTS[name]}


def test_a_train_job_gives_the_options_of_torchrun() -> None:
    """The pods meet at the first of them."""
    assert made(TRAIN_JOB) == {
        "nnodes": "4", "nproc_per_node": "8", "node_rank": 3,
        "rdzv_endpoint": "job-node-0-0.job:29500", "rdzv_id": "job-node-0-0.job:29500",
    }  # fmt: skip


def test_written_options_win_over_the_pod() -> None:
    """Also one that is the default; one node meets nobody."""
    written = made(TRAIN_JOB, "nnodes", "node_rank", nnodes="1", node_rank=0)
    assert written == {"nproc_per_node": "8"}
    own = made({**TRAIN_JOB, "PET_RDZV_ENDPOINT": "h:1"})
    assert own["rdzv_endpoint"] == "h:1"
    assert made({}) == {}


def test_an_indexed_job_numbers_its_pods() -> None:
    """Kubeflow's word counts where both speak."""
    assert made({"JOB_COMPLETION_INDEX": "2"}) == {"node_rank": 2}
    assert made({**TRAIN_JOB, "JOB_COMPLETION_INDEX": "2"})["node_rank"] == 3
    with pytest.raises(ConfigError, match="PET_NODE_RANK='first': expected a whole number"):
        made({"PET_NODE_RANK": "first"})


def test_doctor_knows_a_pod() -> None:
    """And says nothing elsewhere."""
    assert _pod({}) == []
    (finding,) = _pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "pod of Kubernetes" in finding.what


def manifests() -> list[dict[str, Any]]:
    """Those of the document: TrainJob, Service, Job, JobSet, and a Job with a keeper beside."""
    texts = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    return [one for text in texts for one in yaml.safe_load_all(text)]


def test_the_manifests_are_what_they_are_said_to_be() -> None:
    """Kinds, versions, and the fields on which a restart relies."""
    train, service, job, in_place, beside = manifests()
    assert (train["apiVersion"], train["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert service["spec"]["clusterIP"] == "None"
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    volumes = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert f"--nnodes={spec['completions']}" in container["command"]
    endpoint = f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    assert f"--rdzv-endpoint={endpoint}" in container["command"]
    rules = spec["podFailurePolicy"]["rules"]
    assert [(r["action"], r["onExitCodes"]["values"]) for r in rules] == [
        ("Ignore", [75, 143]), ("FailJob", [78, 91, 93]),
    ]  # fmt: skip
    assert all(rule["onExitCodes"]["operator"] == "In" for rule in rules)
    assert pod["restartPolicy"] == "Never", "podFailurePolicy demands it"
    assert train["spec"]["trainer"]["command"][:2] == ["autockpt", "run"]
    pod = beside["spec"]["template"]["spec"]
    ((keeper,), (container,)) = pod["initContainers"], pod["containers"]
    assert pod["restartPolicy"] == "OnFailure", "else a container is not started again"
    assert keeper["restartPolicy"] == "Always", "else the training waits for its end"
    assert keeper["command"][:2] == ["autockpt", "keeper"]
    assert keeper["command"][2] in container["command"], "the run directory"
    for key in ("env", "volumeMounts", "image"):
        assert keeper[key] == container[key]
    nodes, (rule,) = (
        in_place["spec"]["replicatedJobs"][0],
        in_place["spec"]["failurePolicy"]["rules"],
    )
    spec, pod = nodes["template"]["spec"], nodes["template"]["spec"]["template"]["spec"]
    assert in_place["spec"]["failurePolicy"]["restartStrategy"] == "InPlaceRestart"
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    ((agent,), (container,)) = pod["initContainers"], pod["containers"]
    ((again,), (fail,)) = container["restartPolicyRules"], spec["podFailurePolicy"]["rules"]
    assert agent["restartPolicyRules"] == container["restartPolicyRules"]
    assert again["exitCodes"]["values"] == [0, *fail["onExitCodes"]["values"]]
    assert f"--nnodes={spec['completions']}" in container["command"]
    name = in_place["metadata"]["name"]
    endpoint = f"--rdzv-endpoint={name}-{nodes['name']}-0-0.{name}:29400"
    assert endpoint in container["command"]


def problems(schema: dict[str, Any], value: Any, where: str) -> list[str]:
    """Where a manifest is not what a schema says; a field that it does not name is a problem."""
    if "$ref" in schema:
        return problems(SCHEMAS[schema["$ref"].rpartition("/")[2]], value, where)
    if "oneOf" in schema:
        found = [problems(one, value, where) for one in schema["oneOf"]]
        return min(found, key=len)
    if not isinstance(value, TYPES[schema["type"]]) or isinstance(value, bool) != (
        schema["type"] == "boolean"
    ):
        return [f"{where}: {value!r}, expected {schema['type']}"]
    if value not in schema.get("enum", [value]):
        return [f"{where}: {value!r}, expected one of {schema['enum']}"]
    if isinstance(value, list):
        inner = [problems(schema["items"], one, f"{where}[{n}]") for n, one in enumerate(value)]
        return [problem for one in inner for problem in one]
    if not isinstance(value, dict):
        return []
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    missing = [f"{where}: lacks {name}" for name in schema.get("required", []) if name not in value]
    for name, one in value.items():
        if name not in known and more is None:
            missing.append(f"{where}.{name}: no such field")
        else:
            missing += problems(known.get(name, more), one, f"{where}.{name}")
    return missing


@pytest.mark.parametrize("number", range(5))
def test_manifests_match_the_schemas_of_their_kinds(number: int) -> None:
    """As a server that knows no other field would take them."""
    manifest = manifests()[number]
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    assert problems(SCHEMAS[KINDS[kind]], manifest, kind) == []


def test_the_schemas_find_mistakes() -> None:
    """A misspelt field, a wrong type, a word that is none, a field that is missing."""
    _, _, job, in_place, _ = manifests()
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    job["spec"]["backoffLimit"] = "20"
    del job["spec"]["template"]["spec"]["volumes"][0]["name"]
    found = problems(SCHEMAS[KINDS["batch/v1/Job"]], job, "job")
    assert sorted(one.partition(": ")[2] for one in found) == [
        "'20', expected integer", "lacks name", "no such field",
    ]  # fmt: skip
    in_place["spec"]["failurePolicy"]["restartStrategy"] = "InPlace"
    (one,) = problems(SCHEMAS[KINDS["jobset.x-k8s.io/v1alpha2/JobSet"]], in_place, "set")
    assert "expected one of ['Recreate', 'BlockingRecreate', 'InPlaceRestart']" in one
