"""params.yaml as typed settings. Every error names the key, the value and the remedy, before anything starts.

params.yaml holds every key: there are no defaults in the code, so the file shows all that a run depends on. A
key is added here and in ``profiles/default.yaml``; the stage that reads it lists its section in ``dvc.yaml``.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle3.config.data import (
    HubDataset,
    PromptSettings,
    RegenerateSettings,
    SelfGenerated,
    TargetSettings,
    TaskSettings,
    VocabularySettings,
)
from eagle3.config.drafts import (
    HEAD_FAMILIES,
    MODEL_FAMILIES,
    DraftSettings,
    Eagle3Settings,
    EagleSettings,
    ExternalModelSettings,
    ExternalSettings,
    IndependentSettings,
    TestTimeSteps,
    TrainedSettings,
    TrainSettings,
    changed_draft,
)
from eagle3.config.methods import (
    AdaptiveHeadMethod,
    EvaluateSettings,
    HeadMethod,
    HybridMethod,
    MethodSettings,
    ModelMethod,
    PromptLookupMethod,
    StaticHeadMethod,
    TreeSettings,
)
from eagle3.config.serving import EngineSettings, ServedExperiment, ServingSettings
from eagle3.config.settings import Settings, TrackingSettings
from eagle3.config.studies import AblationSettings, ScalingSettings, StudySettings
from eagle3.config.sweep import SweepSettings
from eagle3.parameters import SettingsError, describe_errors, read_yaml, to_json

__all__ = [
    "HEAD_FAMILIES",
    "MODEL_FAMILIES",
    "AblationSettings",
    "AdaptiveHeadMethod",
    "DraftSettings",
    "Eagle3Settings",
    "EagleSettings",
    "EngineSettings",
    "EvaluateSettings",
    "ExternalModelSettings",
    "ExternalSettings",
    "HeadMethod",
    "HubDataset",
    "HybridMethod",
    "IndependentSettings",
    "MethodSettings",
    "ModelMethod",
    "PromptLookupMethod",
    "PromptSettings",
    "RegenerateSettings",
    "ScalingSettings",
    "SelfGenerated",
    "ServedExperiment",
    "ServingSettings",
    "Settings",
    "StaticHeadMethod",
    "StudySettings",
    "SweepSettings",
    "TargetSettings",
    "TaskSettings",
    "TestTimeSteps",
    "TrackingSettings",
    "TrainSettings",
    "TrainedSettings",
    "TreeSettings",
    "VocabularySettings",
    "changed_draft",
    "load_settings",
    "parse_settings",
]


def parse_settings(values: dict[str, Any], origin: str = "params.yaml") -> Settings:
    """Check a mapping as read from YAML; raises SettingsError with one line a problem."""
    try:
        return Settings.model_validate_json(to_json(values), strict=True)
    except ValidationError as error:
        raise SettingsError(describe_errors(error, values, Settings, origin)) from None


def load_settings(path: Path = Path("params.yaml")) -> Settings:
    """Read and check params.yaml; raises SettingsError (a ValueError) naming key, value and remedy."""
    return parse_settings(read_yaml(path), str(path))
