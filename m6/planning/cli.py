"""``m6 plan``: the commands of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="the profile to write; one that is there keeps what is not measured anew")],
) -> None:
    """Measures this machine: products, memory, the optimizer; under a launcher the links between its ranks."""
    from m6.planning.calibrate import calibrate as measure
    from m6.planning.profile import load_profile, save_profile
    from m6.training.runtime import start

    runtime = start()
    previous = load_profile(out) if out.exists() else None
    profile = measure(runtime.device, previous)
    if runtime.is_main:
        save_profile(profile, out)
        print(f"{out}: {profile.source}; {len(profile.matmul)} products, {len(profile.collectives)} collectives")
