"""The report: says what the results hold, shows what got worse, and needs nothing but itself."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eagle3.report.blocks import Table, TableCell, Tone, cells
from eagle3.report.build import build
from eagle3.report.formats import interval, speedup_cell, tree_text
from eagle3.report.inputs import Inputs, read_inputs
from eagle3.report.losslessness import seeded_table
from eagle3.report.markdown import table
from eagle3.report.pairs import pairs_table
from eagle3.report.provenance import provenance_paragraphs
from eagle3.report.scaling import compact
from eagle3.report.style import line_of
from eagle3.report.sweep import pareto_front
from eagle3.report.training import thin, training_series, training_table
from tests.report.samples import write_evaluation, write_history, write_optional

OPTIONAL = (
    "Ablation",
    "More training data",
    "Sweep of tree parameters",
    "Batch sizes",
    "Serving engines",
    "Training",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section."""
    reports = tmp_path_factory.mktemp("full")
    write_evaluation(reports)
    write_optional(reports)
    history = write_history(reports / "metrics.jsonl", 120)
    build(
        reports,
        training={"eagle3": history, "eagle": reports / "missing.jsonl"},
        target={"source": "pypi:some-model==1.0", "num_layers": 30},
        drafts={"eagle3": {"hidden_size": 576}},
    )
    return reports


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of an evaluation and nothing else, one task, greedy only."""
    reports = tmp_path_factory.mktemp("small")
    write_evaluation(reports, temperatures=(0.0,), tasks=1, faults=False)
    build(reports)
    return reports


def test_scaling_shows_all_tasks_together(full: Path) -> None:
    """scaling.json has a row a task, too; drawn into one line they would zigzag."""
    rows = [line for line in (full / "README.md").read_text().splitlines() if line.startswith("| eagle3 |")]
    (amounts,) = {line.split("|")[2].strip() for line in rows if "1.14×" in line}
    assert amounts == "100,000"
    assert not [line for line in rows if "2.06×" in line], "gsm8k's"


def test_methods_are_compared_with_each_other(full: Path) -> None:
    text = (full / "README.md").read_text()
    assert "**Methods against each other, all tasks together**" in text
    assert "2 comparisons, not corrected for their number" in text
    assert re.search(r"\| eagle3 \| eagle \| T = 0 \(greedy\) \| 1\.\d+× .*\| wins \|", text)


@pytest.mark.parametrize("again", [1.0, 1.03, 0.97])
@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.06, 1.2, "wins"),
        (1.04, 1.2, "not told apart"),
        (0.8, 0.96, "not told apart"),
        (0.8, 0.94, "loses"),
        (None, None, "not told apart"),
    ],
)
def test_a_difference_counts_beyond_that_of_vanilla_from_itself(
    again: float, low: float | None, high: float | None, verdict: str
) -> None:
    pair = {"method": "a", "over": "b", "temperature": 0.0, "speedup": 1.0}
    inputs = Inputs(
        evaluation={"pairs": [{**pair, "speedup_low": low, "speedup_high": high}]},
        per_prompt=pd.DataFrame(),
        training={},
        target={},
        drafts={},
        results=[{"method": "vanilla-aa", "task": "all", "temperature": 0.0, "speedup": again}],
    )
    compared = pairs_table(inputs)
    assert compared is not None
    assert compared.rows[0][-1].text == verdict


def test_a_difference_counts_beyond_a_baseline_that_moved_further() -> None:
    pair = {"method": "a", "over": "b", "temperature": 0.0, "speedup": 1.1, "speedup_low": 1.07}
    inputs = Inputs(
        evaluation={"pairs": [{**pair, "speedup_high": 1.2}]},
        per_prompt=pd.DataFrame(),
        training={},
        target={},
        drafts={},
        results=[{"method": "vanilla-aa", "task": "all", "temperature": 0.0, "speedup": 1.08}],
    )
    compared = pairs_table(inputs)
    assert compared is not None
    assert compared.rows[0][-1].text == "not told apart"


def test_a_studys_reservations_code_and_dtype_are_said(full: Path) -> None:
    """ "With the reservations below" was followed by none, and by nothing of how its drafts were held."""
    inputs = read_inputs(full, {}, {}, {}, "make repro")
    inputs.evaluation["settings"]["subject"]["draft_dtype"] = "int8"
    said = [
        paragraph.text
        for paragraph in provenance_paragraphs(
            inputs,
            {
                "verdict": {
                    "summary": "Trusted with the reservations below.",
                    "checks": [
                        {"level": "warning", "sentence": "Only 3 prompts."},
                        {"level": "ok", "sentence": "-"},
                    ],
                },
                "settings": {
                    "subject": {"draft_dtype": "bfloat16"},
                    "origin": {"command": "make studies", "commit": "fedcba9876543210", "dirty": True},
                },
            },
        )
    ]
    assert said == [
        "Trusted with the reservations below.",
        "Only 3 prompts.",
        "Measured on another dtype of the drafts (bfloat16) than the evaluation above.",
        "Command: make studies (at commit fedcba987654, with changes that no commit holds)",
    ]


def test_every_method_has_a_line_of_its_own() -> None:
    methods = ["vanilla", "vanilla-aa", *(f"method {number}" for number in range(25))]
    lines = {tuple(line_of(name, methods).values()) for name in methods[2:]}
    assert len(lines) == 25


def test_what_differs_of_another_machine_is_named(full: Path) -> None:
    inputs = read_inputs(full, {}, {}, {}, "make repro")
    for changes, said in (
        ({"usable_cores": 1}, "another share of the machine (other usable_cores) than"),
        ({"cpu": "Another", "usable_cores": 1}, "another machine (other cpu, usable_cores) than"),
    ):
        machine = {**inputs.evaluation["machine"], **changes}
        (paragraph,) = provenance_paragraphs(inputs, {"machine": machine})
        assert said in paragraph.text
    assert not list(provenance_paragraphs(inputs, {"machine": inputs.evaluation["machine"]}))


def test_results_of_other_drafts_are_called_so(full: Path) -> None:
    """The sample's batch sizes and context lengths name no draft; an evaluation's of today name theirs."""
    text = (full / "README.md").read_text()
    assert text.count("one that was not recorded") >= 2


class Page(HTMLParser):
    """Collects what the tests ask of the page, and fails on unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.captions = 0
        self.tables = 0
        self.header_scopes: list[str | None] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values["href"]))
        self.sources += [str(values[name]) for name in ("src", "srcset") if name in values]
        self.tables += tag == "table"
        self.captions += tag == "caption"
        if tag == "th":
            self.header_scopes.append(values.get("scope"))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if len(self._open) > 1 and self._open[-2:] == ["h2", "a"]:
            self.headings.append(data)


def test_page_is_whole_and_self_contained(full: Path) -> None:
    text = (full / "index.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert not page.sources
    assert not re.search(r"url\(\s*['\"]?(?!#)", text)  # no fonts or images from elsewhere
    assert not re.search(r"@import|<link", text)
    # xmlns declarations are names and not addresses; nothing else may point outside.
    outside = set(re.findall(r'(?:href|src)="(https?:[^"]*)"', text))
    assert outside == set()
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert page.tables == page.captions > 10
    assert set(page.header_scopes) == {"col", "row"}


def test_all_sections_with_all_inputs_and_no_empty_ones_without(full: Path, small: Path) -> None:
    whole, bare = Page((full / "index.html").read_text()), Page((small / "index.html").read_text())
    assert set(OPTIONAL) <= set(whole.headings)
    assert not set(OPTIONAL) & set(bare.headings)
    assert "## Sweep" not in (small / "README.md").read_text()
    for heading in ("Verdict", "Speedup", "Acceptance", "Losslessness", "Reproduce"):
        assert heading in bare.headings
        assert f"## {heading}" in (small / "README.md").read_text() or heading == "Verdict"


def test_numbers_of_the_evaluation_are_in_both_texts(full: Path) -> None:
    report = json.loads((full / "evaluation.json").read_text())
    html, markdown = (full / "index.html").read_text(), (full / "README.md").read_text()
    for row in report["results"]:
        if row["task"] == "all" and row["method"] != "vanilla":
            text = f"{row['speedup']:.2f}× ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
            assert text in html
            assert text in markdown
            assert f"{row['tokens_per_second']:,.1f}" in markdown


def test_what_got_worse_is_shown(full: Path) -> None:
    for name in ("index.html", "README.md"):
        text = (full / name).read_text()
        assert re.search(r"Slower than vanilla here: prompt-lookup \(0\.8\d× at T = 0\)", text)
        assert "Do not trust these numbers" in text
        assert "40 differ" in text
        assert "▼" in text
    assert "\n- Slower than vanilla on this machine: prompt-lookup" in (full / "README.md").read_text()


def test_the_servers_own_average_is_shown_beside_the_answers(full: Path) -> None:
    said = "eagle3 on sglang: 2.31 tokens a verification by its /server_info, 2.25 by its answers"
    assert said in (full / "index.html").read_text()


def test_a_sweep_names_its_reservations(full: Path) -> None:
    for name in ("index.html", "README.md"):
        assert "Only 9 prompts were measured on held-out tasks." in (full / name).read_text()


def test_a_method_that_changes_tokens_is_never_the_winner(full: Path) -> None:
    # "broken" is the fastest of the sample and changes every output.
    report = json.loads((full / "evaluation.json").read_text())
    rows = [row for row in report["results"] if row["task"] == "all" and row["temperature"] == 0]
    assert max(rows, key=lambda row: row["speedup"])["method"] == "broken"
    lead = (full / "README.md").read_text().split("\n\n")[1]
    assert lead.startswith("eagle3 decodes")
    assert lead.endswith("It is the fastest of 3 rows, chosen on these same prompts: an upper estimate.")
    assert "**broken**" not in (full / "README.md").read_text()


def test_bound_and_throughput_are_shown(full: Path) -> None:
    markdown = (full / "README.md").read_text()
    assert "| Tokens whose arithmetic fits into the time of reading | 13 |" in markdown
    assert "538 MB" in markdown
    assert "| eagle3-adaptive | 2.50 | 2.75 | 45.0 | 45.5 | 46.1 |" in markdown
    assert "| 8 | 160.0 | 176.0 | 1.10× (1.00 to 1.20) |" in markdown


def test_a_draft_that_fails_beyond_its_training_length_is_named(full: Path) -> None:
    markdown = (full / "README.md").read_text()
    assert "| Draft | 128 | 256 | 512 (longer) |" in markdown
    assert "| eagle3 | 1.80 | 1.70 | 1.50 |" in markdown
    assert "eagle fails on long contexts: τ falls from 1.60 within its training length to 1.10" in markdown
    assert "eagle3 fails" not in markdown


def test_published_numbers_carry_their_source(full: Path) -> None:
    markdown = (full / "README.md").read_text()
    assert "Published (arXiv 2503.01840, Table 1), T = 0" in markdown
    assert "| Vicuna-13B | EAGLE-3 | 5.58× / 6.65 | 6.47× / 7.54 |" in markdown
    assert "| + fused features (EAGLE-3) | 4.40× / 6.13 | 4.48× / 6.23 |" in markdown


def test_provenance_is_shown(full: Path) -> None:
    html = (full / "index.html").read_text()
    for text in (
        "Imaginary CPU @ 2.00GHz",
        "pypi:some-model==1.0",
        "0123456789abcdef",
        "2.13.0",
        "make repro",
    ):
        assert text in html
    assert "git checkout 0123456789abcdef" in html
    assert "had changes that this commit does not hold" in html


def test_every_figure_of_the_markdown_is_a_file_and_no_other(full: Path) -> None:
    named = set(re.findall(r"\]\(figures/([^)]+)\)", (full / "README.md").read_text()))
    files = {path.name for path in (full / "figures").iterdir()}
    assert named == files
    assert "training-eagle3.png" in named
    assert "training-eagle.png" not in named  # its history does not exist


def test_equal_inputs_give_equal_bytes(small: Path) -> None:
    paths = [small / "index.html", small / "README.md", *(small / "figures").iterdir()]
    before = {path.name: path.read_bytes() for path in paths}
    (small / "figures" / "stale.png").write_bytes(b"of an older report")
    build(small)
    after = {path.name: path.read_bytes() for path in [*paths[:2], *(small / "figures").iterdir()]}
    assert after == before


def test_text_in_figures_follows_the_page(full: Path) -> None:
    html = (full / "index.html").read_text()
    assert "currentColor" in html
    assert "#010203" not in html


def test_missing_evaluation_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.json does not exist: measure first"):
        build(tmp_path)


def test_broken_files_are_named(small: Path, tmp_path: Path) -> None:
    for name in ("evaluation.json", "per_prompt.parquet"):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    history = tmp_path / "metrics.jsonl"
    history.write_text('{"step": 1, "loss": 2.0}\n{"loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        build(tmp_path, training={"eagle3": history})
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match=r"sweep\.json is not JSON"):
        build(tmp_path)


def test_text_from_results_cannot_break_the_page(small: Path, tmp_path: Path) -> None:
    report = json.loads((small / "evaluation.json").read_text())
    report["machine"]["cpu"] = "<script>alert(1)</script> | a * b"
    (tmp_path / "evaluation.json").write_text(json.dumps(report))
    (tmp_path / "per_prompt.parquet").write_bytes((small / "per_prompt.parquet").read_bytes())
    build(tmp_path)
    assert "<script" not in (tmp_path / "index.html").read_text()
    row = next(line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("| cpu"))
    assert row == r"| cpu | &lt;script>alert(1)&lt;/script> \| a \* b |"


def test_speedups_are_marked_by_their_interval() -> None:
    row = {"method": "eagle", "speedup": 1.1, "speedup_low": 1.05, "speedup_high": 1.2}
    assert speedup_cell(row).tone is Tone.GOOD
    assert speedup_cell({**row, "speedup_low": 0.95}) == TableCell("1.10× (0.95–1.20) ≈", Tone.WARNING)
    slower = {**row, "speedup": 0.9, "speedup_low": 0.85}
    assert speedup_cell({**slower, "speedup_high": 0.95}).tone is Tone.BAD
    assert speedup_cell({**slower, "speedup_high": 1.02}).tone is Tone.WARNING, "within noise"
    assert speedup_cell({**row, "speedup_low": None}).text == "1.10× (no interval)"
    assert interval({"speedup": None}, "speedup") == "–"
    assert tree_text({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}) == "5 / 4 / 8"


def test_markdown_table() -> None:
    block = Table("Caption", ("Name", "Value"), (cells(["a|b", TableCell("1", Tone.BAD)]),), note="a note")
    assert table(block) == (
        "**Caption**\n\n| Name | Value |\n| :--- | ---: |\n| a\\|b | **1** |\n\n<sub>a note</sub>"
    )


def test_training_metrics_are_grouped_by_depth_and_none_is_dropped() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "accuracy/depth_0": 0.1, "accuracy/depth_1": 0.05, "note": "text"},
        {"step": 2, "loss": float("nan"), "accuracy/depth_0": 0.2, "acceptance_length": 1.2, "own_metric": 7},
    ]
    series = training_series(history)
    assert list(series) == ["loss", "accuracy", "acceptance_length", "own_metric"]
    assert series["loss"] == {"": ([1.0], [2.0])}
    assert series["accuracy"] == {"0": ([1.0, 2.0], [0.1, 0.2]), "1": ([1.0], [0.05])}


def test_training_table_names_the_best_step_and_not_the_last() -> None:
    history = [
        {"step": step, "loss": 3.0 - step, "acceptance_length": length}
        for step, length in [(1, 1.2), (2, 1.9), (3, 1.7)]
    ]
    (row,) = training_table({"eagle3": history}).rows
    assert [cell.text for cell in row] == ["eagle3", "3", "0.000", "1.900", "2", "–"]


def test_long_curves_are_averaged_and_keep_their_mean() -> None:
    steps, values = thin(list(range(1000)), [float(index % 2) for index in range(1000)])
    assert len(steps) <= 400
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.01)
    assert thin([1, 2], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_pareto_front_keeps_what_nothing_beats_in_both() -> None:
    trials = [
        {"tau": tau, "speedup": speedup} for tau, speedup in [(1.0, 2.0), (2.0, 1.0), (1.5, 1.5), (1.2, 1.4)]
    ]
    assert [(trial["tau"], trial["speedup"]) for trial in pareto_front(trials)] == [
        (1.0, 2.0),
        (1.5, 1.5),
        (2.0, 1.0),
    ]


def test_amounts_are_short() -> None:
    assert [compact(amount) for amount in (950, 50_000, 1_600_000)] == ["950", "50k", "1.6M"]


def test_sampled_outputs_are_compared_with_vanillas_of_the_same_seed(full: Path) -> None:
    """One output that is not vanilla's has to be missing from the count."""
    inputs = read_inputs(full, {}, {}, {}, "make repro")
    table = seeded_table(inputs)
    assert table is not None
    counts = {row[0].text: (row[1].text, row[2].text) for row in table.rows}
    assert set(counts) == set(inputs.methods) - {"vanilla"}
    total = counts["vanilla-aa"][0]
    assert counts["vanilla-aa"] == (total, total)
    changed = inputs.per_prompt.copy()
    chosen = (changed["method"] == "vanilla-aa") & (changed["temperature"] > 0) & (changed["turn"] == 0)
    outputs: list[list[int]] = [list(token_ids) for token_ids in changed["token_ids"]]
    outputs[list(chosen).index(True)].append(1)
    changed["token_ids"] = outputs
    again = seeded_table(replace(inputs, per_prompt=changed))
    assert again is not None
    assert {row[0].text: row[2].text for row in again.rows}["vanilla-aa"] == str(int(total) - 1)
    greedy = changed[changed["temperature"] == 0]
    assert seeded_table(replace(inputs, per_prompt=greedy)) is None
