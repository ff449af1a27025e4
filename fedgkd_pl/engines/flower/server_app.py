"""The ServerApp: ``fedgkd-pl fit``, connected to the nodes."""

from typing import TYPE_CHECKING, Any

from fedgkd_pl.config.build import build_request
from fedgkd_pl.engines.flower.contract import contract_of, request_of
from fedgkd_pl.engines.flower.engine import Link, linked
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.processes.command import quiet_libraries, run_command

if TYPE_CHECKING:
    from flwr.serverapp import ServerApp


def make(file: str) -> "ServerApp":
    """The ServerApp of :func:`fedgkd_pl.flower.server_app`."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        with linked(grid) as link:
            code = run_command(lambda: _fit(file, context.run_config, link))
        if code:
            raise RunFailed(f"the run of {file} ended with code {code}")

    return app


def _fit(file: str, run_config: Any, link: Link) -> int:
    """Trains, once the contract for the clients is known."""
    quiet_libraries()
    resume = str(run_config.get("resume", ""))
    experiment = build_request(request_of(file, run_config, ["--resume", resume] * bool(resume)))
    try:
        experiment.check()
        link.contract = contract_of(experiment)
    except BaseException:
        experiment.start.release()
        raise
    experiment.fit()
    return 0
