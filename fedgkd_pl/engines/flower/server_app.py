"""The ServerApp: ``fedgkd-pl fit`` with a way to the nodes."""

from typing import TYPE_CHECKING, Any

from fedgkd_pl.cli.commands import run
from fedgkd_pl.engines.flower.contract import contract_of, words_of
from fedgkd_pl.engines.flower.engine import Link, linked
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.settings.build import FederatedCLI

if TYPE_CHECKING:
    from flwr.serverapp import ServerApp


def make(file: str) -> "ServerApp":
    """See :func:`fedgkd_pl.flower.server_app`.

    Args:
        file: the app's ``__file__``.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        resume = str(context.run_config.get("resume", ""))
        words = words_of(file, context.run_config)
        if resume:
            words[1:1] = ["--resume", resume]
        with linked(grid) as link:
            try:
                code = run(words, kind=_kind(link))
            except SystemExit as stop:  # the parser has told what is wrong
                code = int(stop.code or 0)
        if code:
            raise RunFailed(f"fedgkd-pl {' '.join(words)} ended with code {code}")

    return app


def _kind(link: Link) -> type[FederatedCLI]:
    class OverFlower(FederatedCLI):
        """A run whose clients are told what they must agree to."""

        def before_fit(self) -> None:
            link.contract = contract_of(self)
            super().before_fit()

    return OverFlower
