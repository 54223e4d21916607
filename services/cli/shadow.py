"""`natterjack shadow`: mirrors live requests to a second pipeline and says how well it agrees."""

from typing import Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline


def shadow(
    fraction: Annotated[
        float, typer.Argument(metavar="FRACTION", min=0.0, max=1.0, help="The part of the requests, such as 0.1.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="PREFIX", help="Subject prefix of the second pipeline.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Ask this model there, not the same one.", show_default=False)
    ] = None,
    max_open: Annotated[
        int, typer.Option("--concurrency", min=1, help="Mirrored requests at a time; more are dropped and counted.")
    ] = 32,
    limit_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="How long one request may take.")
    ] = 300.0,
    duration_s: Annotated[
        float | None, typer.Option("--duration", metavar="SECONDS", min=0.0, help="Stop then.", show_default=False)
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option("--requests", metavar="N", min=1, help="Stop when N requests were compared.", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", metavar="PORT", min=0, max=65535, help="Serve /metrics there; 0: any free one."),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Mirror a part of the live requests to a second pipeline on the same bus, and compare what both answer.

    Which part is decided by the requests' ids, so it is the same at every attempt. Clients and the live pipeline notice
    nothing: the shadow only listens there. Ctrl-C ends it. Exit code 0: both agree, 1: some requests differ, 2: nothing
    was compared.
    """
    settings = load_pipeline(config, overrides).settings.bus
    from services.cli.foreground import run
    from services.cli.recorded import unusable_unless_done
    from services.cli.shadow_run import Wishes, check_prefix, run_shadow
    from services.recording.shadowing import ShadowLimits

    check_prefix(to, settings)
    wishes = Wishes(to, ShadowLimits(fraction, max_open, limit_s, model), duration_s, num_requests, metrics_port)
    raise typer.Exit(run(unusable_unless_done(run_shadow(settings, wishes, as_json))))
