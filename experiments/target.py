"""Fetch the target model and write it once as safetensors with tokenizer, chat template and manifest."""

from cli import read_settings, stage_parser
from eagle3 import paths


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params).target

    from eagle3.models.prepare import prepare_target

    manifest = prepare_target(settings.source, paths.TARGET, settings.file, settings.capture_layers)
    print(
        f"{paths.TARGET}: {manifest['model_type']}, {manifest['parameters'] / 1e6:.0f}M parameters, "
        f"{manifest['num_layers']} layers, hidden states {manifest['capture_layers']} feed the draft"
    )


if __name__ == "__main__":
    main()
