"""Whether a server that runs already serves what is asked of it, as far as it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eagle3.serving.client import Client
from eagle3.serving.engines import ALGORITHMS, Service
from eagle3.serving.protocol import names_model

_DTYPES = ("float32", "bfloat16", "float16")


def check_service(client: Client, service: Service, warn: Callable[[str], None]) -> None:
    """Compare what a server tells of itself with what it is taken for.

    SGLang tells its settings; vLLM its model alone. Paths may differ between machines for the same files, so
    that another path is a warning; another tree, dtype or algorithm is an error.

    Args:
        warn: takes what cannot be decided.

    Raises:
        ValueError: if it serves something else.
        ServerError: if it does not answer.
    """
    model = client.model_path()
    if model and not names_model(model, service.target):
        warn(f"{client.url} serves {model}; check that it is the target of params.yaml")
    if client.engine != "sglang":
        return
    info = client.server_info()
    for what, told, wanted in _decisive(info, service):
        if told != wanted:
            raise ValueError(
                f"{client.url} serves {what} {told}, and {wanted} is asked of it: start it with what "
                "params.yaml says, or take it out of serving.sglang.urls"
            )
    draft = info.get("speculative_draft_model_path")
    if service.speculation is not None and draft and not names_model(str(draft), service.speculation.draft):
        warn(f"{client.url} drafts with {draft}; check that it is {service.speculation.draft}")
    compiled = info.get("enable_torch_compile")
    if compiled is not None and bool(compiled) != service.compiled:
        warn(f"{client.url}: enable-torch-compile is {compiled} there, and {service.compiled} in params.yaml")


def _decisive(info: dict[str, Any], service: Service) -> list[tuple[str, Any, Any]]:
    """What has to be equal, where the server tells it: (name, there, here)."""
    speculation = service.speculation
    wanted: dict[str, Any] = {
        "speculative_algorithm": None if speculation is None else ALGORITHMS[speculation.family]
    }
    if speculation is not None:
        wanted |= {
            "speculative_num_steps": speculation.num_steps,
            "speculative_eagle_topk": speculation.topk,
            "speculative_num_draft_tokens": speculation.num_draft_tokens,
        }
    if info.get("dtype") in _DTYPES:
        wanted["dtype"] = service.dtype
    return [(key, info[key], value) for key, value in wanted.items() if key in info]
