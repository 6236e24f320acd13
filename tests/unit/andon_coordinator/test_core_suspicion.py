"""How long the line waits for an answer: learnt from those before, and from its own mistakes."""

import pytest

from andon_coordinator.core.suspicion import Delays, ProcessAnswers, durations_of_rounds

LEASE_S = 3.0


def _known(*delays_s: float) -> ProcessAnswers:
    answers = ProcessAnswers()
    for delay_s in delays_s:
        number = answers.ask(0.0, 0.0)
        answers.answered(number, delay_s, 0.0)
    return answers


def _wronged(answers: ProcessAnswers, at: float) -> None:
    answers.ask(at, 0.0)
    answers.suspected()
    answers.forget_probe()
    assert answers.came_back(at + 1.0, LEASE_S) == 1.0


def test_a_process_of_which_nothing_is_known_has_its_lease() -> None:
    answers = _known(*[0.002] * 9)

    assert answers.patience_s(0.0, LEASE_S) == LEASE_S


def test_a_process_that_answers_at_once_is_suspected_after_a_tenth_of_a_second() -> None:
    answers = _known(*[0.002] * 10)

    assert answers.patience_s(0.0, LEASE_S) == pytest.approx(0.142, abs=0.001)


def test_nobody_is_suspected_before_half_as_long_again_as_its_longest_answer() -> None:
    answers = _known(*[0.002] * 63, 1.0)

    assert answers.patience_s(0.0, LEASE_S) == 1.5


def test_answers_that_vary_buy_more_patience() -> None:
    answers = _known(*[0.05, 0.25] * 8)

    assert answers.patience_s(0.0, LEASE_S) == pytest.approx(0.15 + 5.612 * 0.1, abs=0.001)


def test_patience_ends_with_the_lease() -> None:
    answers = _known(*[2.5] * 10)

    assert answers.patience_s(0.0, LEASE_S) == LEASE_S


def test_only_the_last_answers_count() -> None:
    answers = _known(1.0, *[0.002] * 64)

    assert answers.patience_s(0.0, LEASE_S) < 0.2


def test_each_mistake_doubles_the_patience_until_the_lease_decides() -> None:
    answers = _known(*[0.002] * 10)
    first = answers.patience_s(0.0, LEASE_S)
    patience = []
    for mistake in range(5):
        _wronged(answers, 10.0 * mistake)
        patience.append(answers.patience_s(10.0 * mistake + 1.0, LEASE_S))

    assert patience == pytest.approx([2 * first, 4 * first, 8 * first, 16 * first, LEASE_S])


def test_mistakes_are_forgiven_one_by_one() -> None:
    answers = _known(*[0.002] * 10)
    first = answers.patience_s(0.0, LEASE_S)
    _wronged(answers, 10.0)
    _wronged(answers, 20.0)

    assert answers.patience_s(620.0, LEASE_S) == pytest.approx(4 * first)
    assert answers.patience_s(622.0, LEASE_S) == pytest.approx(2 * first)
    assert answers.patience_s(1222.0, LEASE_S) == pytest.approx(first)


def test_a_process_that_stays_away_for_a_lease_was_suspected_rightly() -> None:
    answers = _known(*[0.002] * 10)
    before = answers.patience_s(0.0, LEASE_S)
    answers.ask(10.0, 0.0)
    answers.suspected()
    answers.forget_probe()

    assert answers.came_back(10.0 + LEASE_S, LEASE_S) is None
    assert answers.patience_s(20.0, LEASE_S) == before


def test_a_process_that_was_not_suspected_comes_back_without_a_mistake() -> None:
    assert _known(*[0.002] * 10).came_back(1.0, LEASE_S) is None


def test_time_in_which_the_line_did_not_listen_is_no_silence() -> None:
    answers = ProcessAnswers()
    number = answers.ask(10.0, 0.5)

    assert answers.silent_s(10.75, 1.0, 0.0) == 0.25
    answers.answered(number, 10.75, 1.0)
    assert list(answers.delays.kept) == [0.25]
    assert answers.silent_s(10.75, 1.0, 0.0) == 0.0


def test_a_message_of_any_kind_ends_a_silence() -> None:
    answers = ProcessAnswers()
    answers.ask(10.0, 0.0)

    assert answers.silent_s(10.75, 0.0, 10.5) == 0.25


def test_an_answer_to_an_older_probe_says_nothing() -> None:
    answers = ProcessAnswers()
    older = answers.ask(10.0, 0.0)
    answers.forget_probe()
    answers.ask(11.0, 0.0)

    answers.answered(older, 11.5, 0.0)

    assert not answers.delays.kept
    assert answers.silent_s(11.5, 0.0, 0.0) == 0.5


def test_a_round_is_late_once_one_in_a_hundred_takes_longer() -> None:
    rounds = durations_of_rounds()
    rounds.kept.extend([0.9, 1.1] * 8)

    assert isinstance(rounds, Delays)
    assert rounds.until_late_s() == pytest.approx(1.0 + 2.326 * 1.4826 * 0.1, abs=0.001)


def test_a_round_that_took_long_now_and_then_makes_no_other_seem_usual() -> None:
    rounds = durations_of_rounds()
    rounds.kept.extend([*[0.1] * 28, 5.0, 5.0])

    assert rounds.until_late_s() < 0.15
