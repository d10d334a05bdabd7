"""Scaling: the drafts trained on more and more of the data, and decoded side by side."""

from cli import choose_device, read_settings, stage_parser


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    from eagle3.studies.run import run_study

    run_study(settings, "scaling", choose_device())


if __name__ == "__main__":
    main()
