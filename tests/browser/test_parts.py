"""The parts of the page that need no line: curves, the stream's messages, words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from browser.conftest import Opens
from integration.harness import Service

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a board whose line waits for its workers."""
    with Service(tmp_path_factory.mktemp("parts") / "runs" / "7f3a", 1) as service:
        yield service.metrics_url.removesuffix("metrics")


@pytest.fixture
def ask(board: str, look: Opens) -> Any:
    """Runs a function with the modules of the page, and returns what it returns."""
    page = look(board).page

    def answer(module: str, body: str) -> Any:
        return page.evaluate(f"import('/board/{module}').then(m => {{ {body} }})")

    return answer


FETCHED = """
    const fetched = (steps) => ({
      steps: { step: steps, loss: steps, loss_min: steps, loss_max: steps, step_seconds: steps,
               samples_per_second: steps, at_unix_s: steps },
      scalars: { val: { step: steps, value: steps } },
    });
    const point = (step) => [step, step / 10, 0.5, 8, null, 1.5, 100 + step];
"""


def test_points_that_the_journal_had_already_are_dropped_and_newer_ones_stay(ask: Any) -> None:
    steps, losses, rates = ask(
        "curves.js",
        f"""{FETCHED}
        const curves = new m.Curves();
        curves.add({{ steps: [point(3), point(4), point(5)] }});
        curves.load(fetched([1, 2, 3, 4]));
        curves.add({{ steps: [point(4), point(5), point(6)] }});
        return [curves.steps.step, curves.steps.loss, curves.steps.samples_per_second];""",
    )

    assert steps == [1, 2, 3, 4, 5, 6]
    assert losses == [1, 2, 3, 4, 0.5, 0.6]
    assert rates[-2:] == [16, 16]


def test_a_scalar_is_the_mean_over_the_workers_that_logged_it(ask: Any) -> None:
    val = ask(
        "curves.js",
        f"""{FETCHED}
        const curves = new m.Curves();
        curves.load(fetched([1, 2]));
        curves.add({{ scalars: [["val", 2, 1, 50], ["val", 3, 0, 4], ["val", 3, 1, 8]] }});
        curves.add({{ scalars: [["val", 4, 0, null], ["val", 3, 1, 99]] }});
        return curves.scalars.get("val");""",
    )

    assert val == {"step": [1, 2, 3, 4], "value": [1, 2, 6, None]}


def test_fragments_budgets_for_spikes_and_trimmed_means_are_said_in_words(ask: Any) -> None:
    said = ask(
        "workers.js",
        """return [
          m.parted(null), m.spiking(null), m.trimming(null),
          m.parted({ count: 4, exchanged: 2, mix: 0.5 }),
          m.parted({ count: 4, exchanged: null, mix: 0 }),
          m.spiking({ steps: 1000, left: { limit: 50, skip: 0 } }),
          m.trimming({ left_out: null }), m.trimming({ left_out: 0 }),
          m.trimming({ left_out: 2 }),
        ];""",
    )

    assert said == [
        *("", "", ""),
        "Exchanged in 4 fragments: fragment 3 is exchanged now, and workers keep 50\u202f% of "
        "their own weights.",
        "Exchanged in 4 fragments: the whole model is exchanged now.",
        "Spikes: of its budget for 1\u202f000 steps the line has left: limit 50, skip 0.",
        "Trimmed mean.",
        "Trimmed mean, but the last step had too few contributions: it had the weighted one.",
        "Trimmed mean: without the 2 lowest and highest contributions to each element.",
    ]


def test_a_moving_average_begins_at_the_first_value_and_leaves_gaps(ask: Any) -> None:
    average = ask("curves.js", "return m.smoothed([4, null, 2, 2], 0.5);")

    assert average == [4, None, pytest.approx(8 / 3), pytest.approx(16 / 7)]


def test_curves_with_other_steps_share_an_axis(ask: Any) -> None:
    body = "return m.joined([{step: [1, 3], value: [10, 30]}, {step: [2, 3], value: [2, 3]}]);"

    assert ask("curves.js", body) == [[1, 2, 3], [10, None, 30], [None, 2, 3]]


def test_an_empty_chart_has_no_labels_and_norms_get_a_chart_where_there_are_any(
    ask: Any,
) -> None:
    before, later, hidden, drawn, titles = ask(
        "panels.js",
        """
        const place = document.body.appendChild(document.createElement("div"));
        const charts = new m.RunCharts(place);
        const curves = { steps: {}, scalars: new Map() };
        const names = "step loss loss_min loss_max step_seconds samples_per_second".split(" ");
        for (const name of names) curves.steps[name] = [];
        const said = () => place.querySelector(".nothing").textContent;
        const look = (part) => getComputedStyle(place.querySelector(part)).visibility;
        const shown = () => [look(".plot"), look(".legend")];
        charts.draw(curves);
        charts.expect(0);
        const before = said(), hidden = shown();
        charts.expect(59);
        const later = said();
        for (const name in curves.steps) curves.steps[name] = [1, 2];
        charts.draw(curves);
        const drawn = shown();
        curves.steps.gradient_norm = [null, 1.5];
        charts.draw(curves);
        const titles = [...place.querySelectorAll("h3")].map((each) => each.textContent);
        return [before, later, hidden, drawn, titles];""",
    )

    assert titles == ["Loss", "Step time", "Throughput", "Gradient norm"]
    assert before == "The first committed step begins the curve."
    assert later == "Reading the steps so far."
    assert hidden == ["hidden", "hidden"]
    assert drawn == ["visible", "visible"]


def test_messages_are_read_wherever_the_network_cuts_them(ask: Any) -> None:
    messages = ask(
        "live.js",
        r"""
        const text = "retry: 2000\n\nevent: state\ndata: {\"a\": 1}\n\n: nothing new\n\n" +
                     "data: one\r\ndata: two\r\n\r\n";
        const read = (pieces) => {
          const lines = new m.Lines();
          return pieces.flatMap((piece) => lines.read(piece));
        };
        const cuts = [...text].map((_, at) => read([text.slice(0, at), text.slice(at)]));
        cuts.push(read([...text]));
        return cuts;""",
    )

    assert len(messages) > 50
    for each in messages:
        assert each == [["state", '{"a": 1}'], ["message", "one\ntwo"]]


def test_numbers_have_units_and_few_digits(ask: Any) -> None:
    texts = ask(
        "words.js",
        """return [m.count(1234567), m.figure(2.41349), m.figure(0.00031), m.figure(null),
                   m.figure(-1234.4), m.rate(3.44), m.span(0.0063), m.span(0.0841), m.span(1.234),
                   m.duration(72), m.duration(7500), m.percent(0.236), m.listed([0, 1, 3]),
                   m.shortly(0.5), m.shortSpan(0.05), m.shortSpan(0)];""",
    )

    assert [text.replace("\u202f", " ") for text in texts] == [
        *("1 234 567", "2.413", "3.10e-4", "–", "−1 234", "3.4", "6.3 ms", "84 ms", "1.23 s"),
        *("1m12s", "2h05m", "24 %", "0, 1 and 3", "0.5", "50 ms", "0"),
    ]


@pytest.mark.parametrize(
    ("state", "signal", "light"),
    [
        ("RUNNING", {"kind": "live"}, "green"),
        ("FORMING", {"kind": "live"}, "amber"),
        ("SYNCING", {"kind": "live"}, "amber"),
        ("HALTED", {"kind": "live"}, "red"),
        ("COMPLETE", {"kind": "live"}, "blue"),
        ("RUNNING", {"kind": "lost", "failures": 1}, "off"),
        ("HALTED", {"kind": "lost", "failures": 9}, "off"),
        ("COMPLETE", {"kind": "lost", "failures": 9}, "blue"),
    ],
)
def test_a_state_puts_its_light_on_only_while_the_line_is_heard(
    ask: Any, state: str, signal: dict[str, Any], light: str
) -> None:
    known = {"state": state, "step": 3, "live": 1, "participating": 1, "expect_workers": 1}
    known |= {"workers": [], "waiting_for": "", "stop_reason": "", "halt": None}

    shown = ask("light.js", f"return m.lineLight({json.dumps(known)}, {json.dumps(signal)}).light;")

    assert shown == light
