"""Choose the tokens a draft can propose: the most frequent ones of the target's answers."""

import json

from cli import read_settings, run_in_words, stage_parser
from eagle3 import paths


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    from eagle3.data.rows import MANIFEST, read_rows
    from eagle3.data.vocabulary import build_vocabulary, count_tokens, hash_tokenizer, save_vocabulary
    from eagle3.models.target import Target

    rows = read_rows(paths.REGENERATED)
    target = Target.load(paths.TARGET, compiled=False)
    manifest = json.loads((paths.REGENERATED / MANIFEST).read_text(encoding="utf-8"))
    answers = (
        row.token_ids[start:end] for row in rows if row.split == "train" for start, end in row.answer_spans
    )
    counts = count_tokens(answers, target.vocab_size)
    vocabulary = build_vocabulary(
        counts,
        settings.vocabulary.size,
        target.eos_token_ids,
        hash_tokenizer(target.tokenizer),
        manifest["data_hash"],
    )
    save_vocabulary(vocabulary, paths.VOCABULARY)
    print(
        f"{paths.VOCABULARY}: {vocabulary.size} of {vocabulary.target_size} tokens, "
        f"{vocabulary.coverage:.1%} of the answers' tokens"
    )


if __name__ == "__main__":
    run_in_words(main)
