"""What a person sees of a start: a table on a terminal, lines elsewhere."""

import io

from rich.console import Console

from services.cli.progress import StageDisplay
from services.supervisor.events import StageEvent

START = [
    StageEvent("nats-server", "starting", "starting process"),
    StageEvent("nats-server", "ready", detail="nats://127.0.0.1:1"),
    StageEvent("executor-0", "starting", "loading model", 0.25),
    StageEvent("executor-0", "starting", "loading model", 0.75),
]
TROUBLE = StageEvent("executor-0", "restarting", "it ended with exit code 5", detail="again in 0.2 s")


def shown(events, *, is_terminal, is_transient=False):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)
    with StageDisplay(is_transient=is_transient, console=console) as display:
        for event in events:
            display.on_event(event)
    return console.file.getvalue()


def test_without_a_terminal_each_stage_is_one_line():
    assert shown(START, is_terminal=False).splitlines() == [
        "nats-server: starting, starting process",
        "nats-server: ready, nats://127.0.0.1:1",
        "executor-0: starting, loading model",
    ]


def test_without_a_terminal_a_display_for_one_call_speaks_of_trouble_only():
    assert shown([*START, TROUBLE], is_terminal=False, is_transient=True).splitlines() == [
        "executor-0: restarting, it ended with exit code 5, again in 0.2 s"
    ]


def test_a_terminal_shows_every_part_with_its_stage_and_a_bar():
    text = shown([*START, TROUBLE], is_terminal=True)
    assert "nats://127.0.0.1:1" in text
    assert "it ended with exit code 5" in text
    assert "━" in shown(START, is_terminal=True)


def test_a_settled_display_goes_on_in_lines():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with StageDisplay(console=console) as display:
        display.settle()
        display.on_event(TROUBLE)
    assert "executor-0: restarting" in console.file.getvalue()
