"""Launch options in a pod, and the manifests of the documents."""

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
    """Those of the document: a TrainJob, a Service, a Job, and a Job with a keeper beside."""
    texts = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    return [one for text in texts for one in yaml.safe_load_all(text)]


def test_the_manifests_are_what_they_are_said_to_be() -> None:
    """Kinds, versions, and the fields on which a restart relies."""
    train, service, job, beside = manifests()
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
