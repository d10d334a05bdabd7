"""What the sections of params.yaml are made of."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3.parameters import DRAFT_NAME, NAME, URL

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
DraftDtype = Literal[Dtype, "int8"]  # int8: rounded when loaded, on the CPU kernels
Name = Annotated[str, Field(pattern=NAME)]
DraftName = Annotated[str, Field(pattern=DRAFT_NAME)]  # of a key of drafts, which is part of dvc.yaml's keys
Text = Annotated[str, Field(min_length=1)]
Url = Annotated[str, Field(pattern=URL)]
Backend = Literal["kernels", "torch", "compile"]  # what computes a draft
ServingEngine = Literal["sglang", "vllm"]
Engine = Literal["native", ServingEngine]  # what decodes
Tasks = Annotated[tuple[Name, ...], Field(min_length=1)]
NewTokens = Annotated[int, Field(ge=2)]  # of a timed answer: the first token is the prefill's


def repeated(values: Iterable[Any]) -> list[Any]:
    """The values that occur more than once, sorted."""
    return sorted(value for value, count in Counter(values).items() if count > 1)


class Section(BaseModel):
    """A part of params.yaml: immutable, no unknown keys, no NaN, and no guessing at types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
