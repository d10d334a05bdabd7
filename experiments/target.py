"""Fetch the target model and write it once as safetensors with tokenizer, chat template and manifest."""

from cli import read_settings, run_in_words, stage_parser
from eagle3 import paths


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)
    wanted = settings.target

    from eagle3.models.draft import check_draft_settings
    from eagle3.models.prepare import prepare_target

    manifest = prepare_target(wanted.source, paths.TARGET, wanted.file, wanted.capture_layers)
    sizes = [manifest[key] for key in ("vocab_size", "num_attention_heads", "num_layers")]
    for name, draft in settings.drafts.items():
        check_draft_settings(name, draft, settings.vocabulary.size, *sizes)
    print(
        f"{paths.TARGET}: {manifest['model_type']}, {manifest['parameters'] / 1e6:.0f}M parameters, "
        f"{manifest['num_layers']} layers, hidden states {manifest['capture_layers']} feed the draft"
    )


if __name__ == "__main__":
    run_in_words(main)
