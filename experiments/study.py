"""A study beside the pipeline: drafts trained differently on the same data, and decoded side by side.

ablation changes one thing at a time in EAGLE-3; scaling trains the drafts on more and more of the data.
"""

from cli import choose_device, read_settings, run_in_words, stage_parser


def main() -> None:
    parser = stage_parser(__doc__ or "")
    parser.add_argument("study", choices=("ablation", "scaling"), help="which one")
    arguments = parser.parse_args()
    settings = read_settings(arguments.params)

    from eagle3.studies.run import run_study

    run_study(settings, arguments.study, choose_device())


if __name__ == "__main__":
    run_in_words(main)
