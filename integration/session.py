"""What a worker process holds for the engine that it serves."""

import logging
import weakref
from dataclasses import replace
from typing import Final, NoReturn

from torch import fx

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.report import SiteRow, SpliceReport
from eyesplice.fx_passes.splice_pass import SplicePass, spliced_calls
from eyesplice.integration.deployment import Deployment
from eyesplice.ops.compile_ahead import Call, compile_ahead
from eyesplice.ops.site_tables import SiteTables

logger = logging.getLogger("vllm.eyesplice")

_LEAVE_OUT_APP: Final = "leave out the app that needs it"


class Session:
    """One engine in this process: what is deployed, and what the pass made of it.

    Attributes:
        deployment: configuration, sizes and vectors.
        plan: what the pass is asked for.
        report: the site table, None before the model is compiled.
        pass_ran: whether the pass edited a graph in this process; a warm start loads
            an edited one.
        before, after: the graph as text around the splice, when `keep_graphs`.
    """

    def __init__(
        self,
        deployment: Deployment,
        plan: SplicePlan,
        tables: SiteTables | None = None,
    ) -> None:
        """Nothing is spliced.

        Args:
            deployment: configuration, sizes and vectors.
            plan: what the pass is asked for.
            tables: of any op of the graph, None if there is none. They are not kept: a
                session stays until the next one, an engine's memory must not.
        """
        self.deployment = deployment
        self._tables = None if tables is None else weakref.ref(tables)
        self.plan = plan
        self.report: SpliceReport | None = None
        self.pass_ran = False
        self.keep_graphs = _keep_graphs
        self._unspliced = False
        self.before = ""
        self.after = ""
        self._pass = SplicePass(plan)
        self._calls: list[Call] = []

    def splice(self, module: fx.GraphModule) -> None:
        """Run the pass on a whole Dynamo graph; a spliced or foreign one is left alone.

        Raises:
            SpecError: a site that the user named cannot be armed.
        """
        if self.keep_graphs:
            before = module.print_readable(print_output=False)
        report = self._pass(module.graph)
        self._calls = spliced_calls(module.graph)
        if report is None:
            if self._calls:
                self.report = self.report or self.deployment.read_report()
            else:
                self._unspliced = True
            return
        module.recompile()
        self.pass_ran = True
        if self.keep_graphs:
            self.before = before
            self.after = module.print_readable(print_output=False)
        self.adopt(report)

    def compile_ahead(self) -> None:
        """Begin to compile the kernels of the spliced graph, in the background.

        Triton's cache directory must be the one of later starts by now.
        """
        calls, self._calls = self._calls, []
        tables = None if self._tables is None else self._tables()
        if tables is not None:
            compile_ahead(calls, tables)

    def adopt(self, report: SpliceReport) -> None:
        """Take the site table that the pass or the hooks made, and leave it on disk.

        Raises:
            SpecError: a site that the user named cannot be armed.
        """
        self.report = report
        self._refuse_missing(report)
        self.deployment.write_report(report)
        logger.info(
            "spliced %d boundary and %d inline ops, hooked %d modules; %d of %d sites "
            "are missing",
            report.num_boundary_ops,
            report.num_inline_ops,
            report.num_hooks,
            len(report.missing),
            len(report.rows),
        )

    def _refuse_missing(self, report: SpliceReport) -> None:
        """Refuse to run without a site that someone named, or without any."""
        needed = self.deployment.needs.sites
        explicit = self.deployment.config.explicit_sites
        nothing = len(report.missing) == len(report.rows)
        own = {custom.site for custom in self.deployment.custom}
        for row in report.rows:
            if row.form == "module" and row.site in own:
                reason = (
                    "an op of your own needs the value in a graph, this is a hook's"
                )
                self._refuse(replace(row, reason=reason), _LEAVE_OUT_APP)
        for row in report.missing:
            if row.site in needed:
                self._refuse(row, _LEAVE_OUT_APP)
            if explicit or nothing:
                self._refuse(row, "leave it out of `sites`")

    def _refuse(self, row: SiteRow, remedy: str) -> NoReturn:
        raise SpecError(
            "site",
            str(row.site),
            "the sites that this model has",
            f"{remedy}: {row.reason}",
        )

    def require_report(self) -> SpliceReport:
        """The site table of the compiled model.

        A warm start loads compiled code without running the pass; the table then comes
        from the start that compiled it.

        Raises:
            SpecError: the model runs unspliced, or without a site that someone named.
        """
        if self.report is None and self._unspliced:
            raise SpecError(
                "compiled graph",
                "no anchors in it",
                "a decoder whose layers run inside one compiled graph",
                "switch eyesplice off for this model",
            )
        if self.report is None:
            self.report = self.deployment.read_report()
        # The apps may be others than those of the start that compiled it.
        self._refuse_missing(self.report)
        return self.report


_current: Session | None = None
_keep_graphs = False


def keep_graphs() -> None:
    """Make the sessions opened from now on keep their graphs as text."""
    global _keep_graphs
    _keep_graphs = True


def open_session(session: Session) -> None:
    """Make a session the one whose model is compiled next."""
    global _current
    _current = session


def is_open() -> bool:
    """Whether a model has been loaded for a session."""
    return _current is not None


def current_session() -> Session:
    """The session whose model is being compiled."""
    assert _current is not None, "a model is compiled before it was loaded"
    return _current
