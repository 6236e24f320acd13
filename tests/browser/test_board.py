"""The board's page in a browser, watching real lines with real workers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from browser.conftest import ASSETS, PICTURES, Opens, Sight
from browser.film import Film
from integration.fixtures.console import PROTOCOL_WORKER, finish, lines_until, start
from integration.harness import Service, Worker, on_line, start_worker

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).parent / "scripts" / "paced.py")
LONG = 100_000
"""Steps of a line that a test ends."""
SEEN_LONG = 260 if PICTURES else 60
"""The steps after which a running line is looked at: a picture shows a curve."""
GONE = {"ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE"} | {
    "ERR_CONNECTION_RESET",
    "503 (Service Unavailable)",
}
"""What a browser's console says of a service that is not there, or not yet."""
RUN, OPERATORS = "the-token-of-the-run", "the-token-of-operators"


@contextmanager
def line(
    folder: Path,
    *paces_s: float,
    steps: int = LONG,
    name: str = "7f3a",
    flags: Sequence[str] = (),
    **more: Any,
) -> Iterator[tuple[Service, list[Worker], dict[str, Any]]]:
    """A service and a worker for each pace: how long its machine takes for a step."""
    spec = {"batch": 256, "steps": steps, "paces_s": paces_s, **more}
    count = len(paces_s)
    with Service(folder / "runs" / name, count, "--run-id", name, *flags) as service:
        workers = [join(folder, service, spec, slot) for slot in range(count)]
        try:
            yield service, workers, spec
        finally:
            for worker in workers:
                worker.kill()


def join(folder: Path, service: Service, spec: dict[str, Any], slot: int) -> Worker:
    connected = on_line(service, slot, len(spec["paces_s"]))
    if "every" in spec:
        connected["ANDON_CHECKPOINT_EVERY"] = str(spec["every"])
        connected["ANDON_RUN_DIR"] = str(service.journal.parent)
    if "token" in spec:
        connected["ANDON_TOKEN_FILE"] = spec["token"]
    return start_worker(folder, spec, slot=slot, script=SCRIPT, ANDON_ON_HALT="wait", **connected)


def board_of(service: Service) -> str:
    return service.metrics_url.removesuffix("metrics")


def at_step(step: int) -> Callable[[pb.LineStatus], bool]:
    return lambda status: status.step >= step


def halted(status: pb.LineStatus) -> bool:
    return status.state == pb.LINE_STATE_HALTED


def see(sight: Sight, word: str) -> None:
    """Waits until the line's light says `word`."""
    sight.page.locator("#light-word", has_text=re.compile(f"^{word}$")).wait_for()


def test_a_running_line_is_shown_live_with_each_worker_and_who_holds_the_others_up(
    tmp_path: Path, look: Opens
) -> None:
    hosts = ["alpha", "beta", "gamma"]
    with line(tmp_path, 0.01, 0.03, 0.012, steps=1000, hosts=hosts) as (service, _workers, _spec):
        sight = look(board_of(service))
        see(sight, "Running")
        service.await_status(at_step(SEEN_LONG))
        page = sight.page

        page.locator("#workers tr[data-holds] .tag", has_text="holds the others up").wait_for()
        page.locator("#feed li[data-kind=joined]").nth(2).wait_for()
        # What the script logs: a loss over the training loss, anything else in a chart of its own.
        page.locator("#charts .tall .legend li", has_text="val_loss").wait_for()
        page.locator("#charts h3", has_text="val_accuracy").wait_for()
        page.locator("#charts h3", has_text="lr").wait_for()
        rows = page.locator("#workers tbody tr")
        step = int(re.sub(r"\D", "", page.locator("#way-step").inner_text().split("/")[0]))
        page.wait_for_function(
            "step => parseInt(document.getElementById('way-step').textContent"
            ".split('/')[0].replace(/\\D/g, '')) > step",
            arg=step,
        )

        assert [
            rows.nth(slot).locator(".place").inner_text().split("\n")[0] for slot in range(3)
        ] == hosts
        assert page.locator("#workers tr[data-holds] th").inner_text().startswith("1")
        used = [rows.nth(slot).locator(".uses").inner_text() for slot in range(3)]
        assert all(re.fullmatch(r"\d+\.\d\scores\s+0\.\d\sGiB", each) for each in used), used
        assert page.locator("body").get_attribute("data-light") == "green"
        assert page.title().startswith("Running")
        described = page.locator("#charts .plot").first.get_attribute("aria-label")
        assert "Loss" in described
        assert "train from" in described
        assert sight.barriers() == []


def test_the_head_names_the_run_and_a_workers_output_is_shown_as_text_below_the_table(
    tmp_path: Path, look: Opens
) -> None:
    script = (PROTOCOL_WORKER, "1000", "--nan-at", "5", "--obey-on-halt")
    process = start(tmp_path, "run", "--workers", "2", "--run-id", "7f3a", *script)
    try:
        lines_until(process, "HALTED at step 5")
        folder = tmp_path / "runs" / "7f3a"
        with (folder / "worker-1.log").open("a") as log:
            log.write("<img src=x onerror=alert(1)>\n")
        board = json.loads((folder / "service.json").read_text())["board_url"]
        sight = look(board, width=320, height=640)
        see(sight, "Halted")
        page = sight.page
        output = page.locator("#output pre")

        page.get_by_role("button", name="output of worker 1").click()
        output.filter(has_text="onerror").wait_for()
        with (folder / "worker-1.log").open("a") as log:
            log.write("epoch 2\n")
        output.filter(has_text="epoch 2").wait_for()

        named = f"run 7f3a · protocol_worker.py · {gethostname()}"
        assert page.locator("#running").inner_text() == named
        assert page.locator("#exchange").inner_text() == "Gradients: float32 over gRPC."
        assert page.locator("main img").count() == 0
        assert sight.overhang() == 0
        assert sight.barriers() == []
        (folder / "worker-0.log").unlink()
        sight.expected |= {"404"}
        page.get_by_role("button", name="output of worker 0").click()
        output.filter(has_text="not kept beside its service").wait_for()
        page.get_by_role("button", name="close").click()
        output.wait_for(state="hidden")
        sight.expected |= GONE
    finally:
        process.send_signal(signal.SIGINT)
        finish(process)


def test_the_loss_is_drawn_as_a_moving_average_at_a_button(tmp_path: Path, look: Opens) -> None:
    with line(tmp_path, 0.0, steps=60) as (service, _workers, _spec):
        sight = look(board_of(service))
        see(sight, "Complete")
        page = sight.page
        # The whole curve: an average of few points may lag behind by less than is written.
        page.locator("#charts .tall .plot[aria-label*=', step 1 to 60:']").wait_for()
        last = page.locator("#charts .tall .legend li", has_text="train").locator(".value")
        last.filter(has_text=re.compile("[0-9]")).wait_for()
        drawn = last.inner_text()

        button = page.get_by_role("button", name="smooth curve of Loss")
        button.click()
        page.locator("#charts .tall [aria-pressed=true]", has_text="smooth").wait_for()
        averaged = last.inner_text()
        button.click()

        assert float(averaged) > float(drawn)  # It lags behind a loss that falls.
        assert last.inner_text() == drawn
        assert sight.barriers() == []
        sight.expected |= GONE


def test_in_the_dark_a_running_line_has_no_barriers_either(tmp_path: Path, look: Opens) -> None:
    hosts = ["alpha", "beta", "gamma"]
    with line(tmp_path, 0.01, 0.03, 0.012, steps=1000, hosts=hosts) as (service, _workers, _spec):
        service.await_status(at_step(SEEN_LONG))
        sight = look(board_of(service), scheme="dark")
        see(sight, "Running")
        sight.page.locator("#feed li[data-kind=joined]").nth(2).wait_for()
        sight.page.locator("#charts .legend .value", has_text=re.compile("[0-9]")).first.wait_for()

        assert sight.barriers() == []
        sight.picture("board-dark")


def test_a_planted_nan_is_shown_as_evidence_and_a_button_resumes_the_line(
    tmp_path: Path, look: Opens
) -> None:
    poison = {"slot": 1, "step": SEEN_LONG}
    hosts = ["alpha", "beta"]
    with line(tmp_path, 0.01, 0.015, poison=poison, hosts=hosts, steps=1000) as (service, _w, _s):
        sight = look(board_of(service))
        page = sight.page
        service.await_status(halted)
        see(sight, "Halted")
        evidence = page.locator("#evidence")
        evidence.wait_for()

        assert page.locator("body").get_attribute("data-light") == "red"
        assert page.title().startswith(f"HALTED at step {SEEN_LONG}")
        assert "worker 1 sent nan in hidden.weight[3, 2]" in page.locator("#light-why").inner_text()
        assert "hidden.weight[3, 2]" in evidence.inner_text()
        assert "docs/guide/halts.md" in evidence.inner_text()
        assert "No weight moved" in page.locator("#alarm").inner_text()
        assert page.locator("#stations li").nth(1).get_attribute("data-light") == "red"
        assert "Leave its 256 samples out" in page.locator("[data-answer=skip]").inner_text()
        page.locator("#feed li[data-kind=halted]").wait_for()
        assert sight.barriers() == []
        sight.picture("board-halted")
        page.locator("[data-answer=retry]").click()
        see(sight, "Running")
        evidence.wait_for(state="hidden")
        page.locator("#feed li[data-kind=answered]").wait_for()
        service.await_status(at_step(SEEN_LONG + 10))


def test_the_film_of_a_halt_is_green_then_red_and_a_click_makes_it_green_again(
    tmp_path: Path, look: Opens
) -> None:
    paces, poison = (0.05, 0.055), {"slot": 1, "step": 75}
    with line(tmp_path, *paces, poison=poison, hosts=["alpha", "beta"], steps=200) as (
        service,
        *_rest,
    ):
        service.await_status(at_step(30))
        sight = look(board_of(service), width=960, height=680)
        see(sight, "Running")
        film, answer = Film(sight.page), sight.page.locator("[data-answer=retry]")

        film.roll(lambda: halted(service.status()) and answer.is_visible())
        film.roll_for(2.5)
        film.point_at(answer)
        answer.click()
        film.roll(lambda: service.status().step >= 100)

        assert film.sequence() == ["green", "red", "green"]
        if PICTURES:
            film.save(ASSETS / "board-halts.gif")


def test_skipping_asks_first_and_the_keyboard_alone_can_do_it(tmp_path: Path, look: Opens) -> None:
    with line(tmp_path, 0.01, 0.01, poison={"slot": 0, "step": 20}) as (service, _w, _s):
        sight = look(board_of(service), scheme="dark")
        page = sight.page
        see(sight, "Halted")
        page.locator("[data-answer=drop]").wait_for()
        focused = "document.activeElement.dataset.answer ?? ''"

        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate(focused) == "skip":
                break
        assert page.evaluate(focused) == "skip"
        page.keyboard.press("Enter")
        page.locator("dialog[open]").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Cancel"
        assert sight.barriers() == []
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="hidden")
        assert service.status().state == pb.LINE_STATE_HALTED
        assert page.evaluate(focused) == "skip"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        see(sight, "Running")
        service.await_status(at_step(25))


def test_a_killed_worker_goes_dark_and_comes_back(tmp_path: Path, look: Opens) -> None:
    hosts = ["alpha", "beta", "gamma"]
    paces = (0.01, 0.03, 0.012)
    with line(tmp_path, *paces, steps=1000, hosts=hosts, every=50) as (service, workers, spec):
        sight = look(board_of(service))
        see(sight, "Running")
        service.await_status(at_step(SEEN_LONG // 2))
        page = sight.page

        workers[2].kill()
        page.locator("#stations li:nth-child(3)[data-light=off]").wait_for()
        page.locator("#feed li[data-kind=lost]").wait_for()
        see(sight, "Running")
        assert "2 of 3 workers train" in page.locator("#light-why").inner_text()
        workers[2] = join(tmp_path, service, spec, 2)
        page.locator("#stations li:nth-child(3)[data-light=green]").wait_for()
        page.locator("#feed li[data-kind=joined]").nth(3).wait_for()
        service.await_status(at_step(SEEN_LONG))
        page.locator("#feed li[data-kind=checkpoint]").first.wait_for()
        page.locator(
            "#figures .cell:last-child strong", has_text=re.compile("50|[1-9]00")
        ).wait_for()
        sight.picture("board-running", whole=True)


def test_the_buttons_halt_the_line_and_drain_it_after_a_question(
    tmp_path: Path, look: Opens
) -> None:
    markup = "<img src=x onerror=alert(1)>"
    hosts = [markup, "b" * 200]
    with line(tmp_path, 0.01, 0.01, hosts=hosts) as (service, workers, _spec):
        sight = look(board_of(service))
        page = sight.page
        see(sight, "Running")
        service.await_status(at_step(5))

        page.locator("#halt-button").click()
        page.locator("#ask-text").fill(markup)
        page.locator("dialog").get_by_role("button", name="Halt", exact=True).click()
        see(sight, "Halted")
        page.locator("#feed li[data-kind=halted]").wait_for()
        # What a worker's host and a person are called stays text, everywhere.
        assert markup in page.locator("#light-why").inner_text()
        assert markup in page.locator("#workers tbody tr").first.inner_text()
        assert page.locator("main img").count() == 0
        assert sight.overhang() == 0
        page.set_viewport_size({"width": 320, "height": 640})
        assert sight.overhang() == 0
        # Nor does a chart that was not drawn anew yet.
        page.evaluate("document.querySelector('.uplot').style.width = '3000px'")
        assert sight.overhang() == 0
        page.set_viewport_size({"width": 1360, "height": 900})
        page.locator("[data-answer=retry]").click()
        see(sight, "Running")
        page.locator("#drain").click()
        page.locator("dialog").get_by_role("button", name="Drain", exact=True).click()
        see(sight, "Complete")
        assert "drained" in page.locator("#light-why").inner_text()
        for worker in workers:
            assert worker.wait() == 0, worker.output


def test_a_phone_shows_all_of_it_without_scrolling_sideways(tmp_path: Path, look: Opens) -> None:
    poison = {"slot": 1, "step": 60}
    with line(tmp_path, 0.01, 0.02, poison=poison, hosts=["alpha", "beta"]) as (service, _w, _s):
        running = look(board_of(service), width=320, height=640)
        see(running, "Running")
        service.await_status(at_step(20))
        assert running.overhang() == 0
        service.await_status(halted)
        see(running, "Halted")
        running.page.locator("[data-answer=drop]").wait_for()

        assert running.overhang() == 0
        assert running.barriers() == []
        running.picture("board-phone", height=1080)
        running.page.goto(f"{board_of(service)}#/runs")
        running.page.locator(".runs tbody tr").wait_for()
        assert running.overhang() == 0


def test_a_board_whose_line_is_gone_says_so_and_finds_it_again(tmp_path: Path, look: Opens) -> None:
    folder = tmp_path / "runs" / "7f3a"
    with line(tmp_path, 0.01) as (service, workers, _spec):
        sight = look(board_of(service))
        sight.expected |= GONE
        see(sight, "Running")
        service.await_status(at_step(5))
        port = service.metrics_url.rsplit(":", 1)[1].split("/")[0]
        workers[0].kill()
        service.stop()

        see(sight, "No signal")
        assert sight.page.locator("body").get_attribute("data-light") == "off"
        assert sight.page.locator("#stations li[data-light=green]").count() == 0
        assert "When last heard it was" in sight.page.locator("#light-why").inner_text()
        assert sight.barriers() == []
    with Service(folder, 1, "--run-id", "7f3a", "--metrics-port", port):
        see(sight, "Forming")
        assert sight.page.locator("#signal").inner_text() == "Live"


def test_a_board_that_somebody_else_answered_asks_again(tmp_path: Path, look: Opens) -> None:
    asked = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) < 3:
            route.fulfill(status=404, body="no such page")
        else:
            route.continue_()

    with line(tmp_path, 0.01) as (service, _workers, _spec):
        sight = look(board_of(service))
        sight.expected |= {"404 (Not Found)"}
        sight.page.route("**/board/api/live", answer)
        sight.page.reload()

        see(sight, "Running")
        assert len(asked) == 3


def test_complete_runs_are_in_the_history_and_two_lie_over_each_other(
    tmp_path: Path, look: Opens
) -> None:
    def finish(name: str, **more: Any) -> Service:
        with line(tmp_path, 0.0, 0.0, steps=120, name=name, **more) as (service, workers, _spec):
            for worker in workers:
                assert worker.wait() == 0, worker.output
            return service

    other = finish("61c0", lr=0.003)
    with line(tmp_path, 0.0, 0.0, steps=120) as (service, workers, _spec):
        sight = look(board_of(service))
        page = sight.page
        see(sight, "Complete")
        for worker in workers:
            assert worker.wait() == 0, worker.output
        assert "after 120 steps" in page.locator("#light-why").inner_text()
        assert page.locator("body").get_attribute("data-light") == "blue"

        page.get_by_role("link", name="Runs").click()
        page.locator(".runs tbody tr").nth(1).wait_for()
        times = page.locator(".runs td[data-title='Time']").all_inner_texts()
        assert len(times) == 2
        assert all(re.fullmatch(r"\d+s|\d+m\d\ds", each) for each in times)
        assert sight.barriers() == []
        page.get_by_label(f"compare run {service.run_id}").check()
        page.get_by_label(f"compare run {other.run_id}").check()
        page.get_by_role("button", name="Compare").click()
        page.locator("#view-compare .plot canvas").first.wait_for()
        described = page.locator("#view-compare .plot").first.get_attribute("aria-label") or ""
        assert f"{service.run_id} from" in described
        assert f"{other.run_id} from" in described
        assert sight.barriers() == []
        sight.picture("board-compare")
        page.get_by_role("button", name="By time since start").click()
        page.locator("#view-compare .plot[aria-label*='time 0s to']").first.wait_for()
        page.get_by_role("link", name=other.run_id).click()
        page.locator("#view-run .happening").first.wait_for()
        assert "Complete" in page.locator("#view-run .badge").inner_text()
        assert sight.barriers() == []
        page.get_by_role("link", name="Line", exact=True).click()
        sight.expected |= GONE
        service.stop()
        page.locator("#light-why", has_text="Its service has ended").wait_for()
        see(sight, "Complete")


def test_a_line_with_tokens_asks_for_one_and_only_an_operators_may_answer(
    tmp_path: Path, look: Opens
) -> None:
    for name, token in (("run", RUN), ("operators", OPERATORS)):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    token, operators = str(tmp_path / "run"), str(tmp_path / "operators")
    flags = ("--token-file", token, "--operator-token-file", operators)
    with line(tmp_path, 0.01, flags=flags, token=token) as (service, _workers, _spec):
        sight = look(board_of(service))
        sight.expected |= {"401"}  # a browser's console says so of every refusal
        page = sight.page
        box = page.get_by_label("Token")

        def enter(secret: str) -> None:
            box.fill(secret)
            page.get_by_role("button", name="Log in").click()

        box.wait_for()
        assert sight.barriers() == []
        assert page.evaluate("document.activeElement.id") == "token"
        enter("the-token-of-nobody!")
        page.locator(".login .failed", has_text="token").wait_for()
        enter(RUN)
        see(sight, "Running")
        assert not page.locator("#halt-button").is_visible()
        page.locator("#login-button").click()
        enter(OPERATORS)
        page.locator("#halt-button").wait_for()
        page.locator("#logout-button").click()
        box.wait_for()
        assert service.run_id not in page.locator("body").inner_text()


def test_a_tab_in_the_background_tells_the_state_by_title_and_icon(
    tmp_path: Path, look: Opens
) -> None:
    # As a browser treats such a tab: it has no frames.
    hidden = """
        Object.defineProperty(document, "hidden", { get: () => true });
        window.requestAnimationFrame = () => 0;
    """
    with line(tmp_path, 0.01, 0.01, poison={"slot": 0, "step": 30}) as (service, _w, _s):
        sight = look(board_of(service), script=hidden)
        service.await_status(halted)

        sight.page.wait_for_function(
            "() => document.title.startsWith('HALTED at step 30')", polling=100
        )
        icon = sight.page.locator("#favicon").get_attribute("href") or ""
        assert icon.startswith("data:image/svg+xml")
        assert "%23e5484d" in icon
